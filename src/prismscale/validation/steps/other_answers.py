"""A rule of thumb for the same steps: a floor that a model of kernels has to beat.

It has one constant, chosen before any row was scored and the same for all rows.
"""

from __future__ import annotations

from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.steps.measured import MeasuredStep

MODEL_UTILISATION = 0.4
"""Model FLOPs utilisation that planners assume for large models. Llama 3's was 0.38 to 0.43 (The
Llama 3 Herd of Models, table 4)."""
OPERATIONS = 6.0
"""Operations per parameter and token: two in the forward pass, four in the backward pass."""
SIX_N_D = f"6·N·D at {100 * MODEL_UTILISATION:.0f} % of the peak"


def six_n_d_ms(step: MeasuredStep) -> float:
    """Return the step time in ms, from parameters and tokens alone."""
    peak = KernelProfile.load(step.gpu).gemm[step.dtype].peak_flops
    operations = OPERATIONS * step.parameters * step.tokens
    return 1000 * operations / (step.gpus * peak * MODEL_UTILISATION)
