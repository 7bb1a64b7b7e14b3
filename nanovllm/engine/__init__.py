"""The host side: requests, scheduling, text. No module here but executor.py imports torch."""
