"""What a trainer has decided about its runs, and what serves their steps."""

from fastpack_trl.run.decisions import Choice
from fastpack_trl.run.run import DEEPSPEED, MERGED_ROW_TOKENS, ONCE_SHARDED, SHARDED, MicroStep, Run

__all__ = ["DEEPSPEED", "MERGED_ROW_TOKENS", "ONCE_SHARDED", "SHARDED", "Choice", "MicroStep", "Run"]
