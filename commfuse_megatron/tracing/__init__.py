"""Recorded steps, made visible: a trace for Perfetto, a picture, and a meter of exposed communication."""
