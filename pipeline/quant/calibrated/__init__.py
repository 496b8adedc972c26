"""Calibrated recipes: llm-compressor's ``oneshot`` on Kimi K3, of which only the experts' values are taken."""

import os

# Three lines a matrix are a quarter of a million for the released model.  Read when llm-compressor is first imported.
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
