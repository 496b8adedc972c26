"""Long-context accuracy: generated tasks, a runner through lm-eval that proves what was sent, outcome classes, the
gate.
"""
