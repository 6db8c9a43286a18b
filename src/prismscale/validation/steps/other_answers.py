"""What rules of thumb say of the same steps: a floor that a model of kernels has to beat.

Both have one constant, chosen before any row was scored and the same for all rows.
"""

from __future__ import annotations

from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.steps.measured import MeasuredStep

MODEL_UTILISATION = 0.4
"""Model FLOPs utilisation that planners assume for large models: Llama 3's was 0.38 to 0.43 (The
Llama 3 Herd of Models, table 4)."""
OPERATIONS = 6.0
"""A parameter and token: two of the forward pass, four of the backward pass."""
SIX_N_D = f"6·N·D at {100 * MODEL_UTILISATION:.0f} % of the peak"


def six_n_d_ms(step: MeasuredStep) -> float:
    """The step by parameters and tokens alone."""
    peak = KernelProfile.load(step.gpu).gemm[step.dtype].peak_flops
    operations = OPERATIONS * step.parameters * step.tokens
    return 1000 * operations / (step.gpus * peak * MODEL_UTILISATION)
