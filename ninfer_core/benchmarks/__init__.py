"""Measurements behind `ninfer bench`: decode, prefill, batches, serving, workloads; floors, result files and tables."""
