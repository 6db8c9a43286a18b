"""What ends a step of ``injured.py``: an optimizer would take seconds to import."""


def step_ends() -> None:
    """Nothing."""
