"""Other stacks' run descriptions, translated to ours: one file per dialect, one for what became of each key."""

from ingot.config.dialects.foundry import FOUNDRY
from ingot.config.dialects.megatron import MEGATRON
from ingot.config.dialects.neox import NEOX

DIALECTS = {dialect.name: dialect for dialect in (FOUNDRY, NEOX, MEGATRON)}
