"""The training step: loss, head, metrics, host work, merged accumulation."""
