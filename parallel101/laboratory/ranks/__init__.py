"""Starts ranks, and hands back their results, output, record and failures. Read launch.py first."""
