"""Figures of models and devices, each with its source."""
