"""Helpers for training frameworks; each module imports its framework."""
