"""Tables and pictures from metrics/variants/*.json.  Reads results, computes no new ones."""
