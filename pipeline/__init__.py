"""Quantize, serve, evaluate and bench Kimi K3 (and its kin): the library behind the DVC stages.

The package imports nothing heavy at top level: torch, vllm and llmcompressor live in environments of their own
(see :mod:`pipeline.env`), and every module that needs one says so in its docstring.
"""
