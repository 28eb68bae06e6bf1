"""Brings ranks to life, hands back what they return, print and do wrong. Start reading at launch.py."""
