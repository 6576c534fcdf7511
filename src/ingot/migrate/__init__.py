"""Other stacks' run descriptions, translated to ours: one file per dialect, one for what became of each key."""

from ingot.migrate.foundry import FOUNDRY
from ingot.migrate.megatron import MEGATRON
from ingot.migrate.neox import NEOX

DIALECTS = {dialect.name: dialect for dialect in (FOUNDRY, NEOX, MEGATRON)}
