"""lm-evaluation-harness with our models: `ingot eval --harness`, and the harness's own command line.

python -m ingot.evaluation.lm_eval --model ingot --model_args path=runs/first --tasks piqa,arc_easy
"""

from importlib.util import find_spec

from ingot.errors import MissingExtra


def require_lm_eval(what: str) -> None:
    """Refuse to go on without the harness."""
    if find_spec("lm_eval") is None:
        raise MissingExtra(what, "eval")
