"""Which path one problem takes: the decision, its reason, and nothing of how."""
