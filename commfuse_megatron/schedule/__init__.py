"""What is sent and multiplied, in which order, on every rank: frozen data, no torch."""
