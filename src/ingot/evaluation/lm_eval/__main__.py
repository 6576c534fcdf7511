"""lm-evaluation-harness's own command line, which also knows the model `ingot`.

The harness does not look for models in installed packages, so a plain `lm-eval --model ingot` cannot find ours.
"""

import sys

from ingot.errors import IngotError
from ingot.evaluation.lm_eval import require_lm_eval


def main() -> None:
    """Register our model and hand over to the harness."""
    try:
        require_lm_eval("python -m ingot.evaluation.lm_eval")
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry

        model_registry.register("ingot", target="ingot.evaluation.lm_eval.model:IngotLM")
        cli_evaluate()
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
