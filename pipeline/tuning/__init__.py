"""Tuning: one setting at a time around a named baseline, then the recommendation against the default in a paired run.

``vllm bench sweep serve`` is not used: it resumes by the presence of a file and not by what was measured, starts
servers outside the machine's lock and watchdog, and knows neither guards nor effective settings.  What it drives,
``vllm bench serve``, is used through :mod:`pipeline.bench`.
"""
