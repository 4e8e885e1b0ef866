"""How much each module keeps: what shares one sparsity, within which bounds, in whole ranks, by a rule or by a plan."""
