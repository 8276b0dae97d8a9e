"""What strangers wrote, who had read the README and not the source: research code with its habits, good and bad."""

from strangers import (  # noqa: F401  # each registers its cases
    between_steps,
    exchanged_code,
    formulas,
    histories,
    limits,
    loops,
    names,
    operations,
    random_and_order,
    settings,
    shapes,
    state_lives,
    states,
)
