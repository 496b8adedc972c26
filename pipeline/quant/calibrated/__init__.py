"""Calibrated recipes: llm-compressor's ``oneshot`` on Kimi K3, of which only the experts' values are taken."""
