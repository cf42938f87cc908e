"""`commfuse demo`: a small GPT trained stock and overlapped."""
