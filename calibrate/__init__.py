"""Calibration: measuring an executor, importing public measurements, fitting latency profiles."""
