"""Every measurement of the paper, for any causal language model."""
