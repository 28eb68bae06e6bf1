"""Parts of zero_1_2_3.py: flat arrays, and hooks for complete buckets and used layers."""
