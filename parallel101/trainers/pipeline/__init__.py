"""A model cut into stages on several ranks (split.py), and what travels between the stages
(messages.py).
"""
