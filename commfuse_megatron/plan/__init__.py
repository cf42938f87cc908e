"""Which way to run one problem: the decision, its reason, and nothing of how."""
