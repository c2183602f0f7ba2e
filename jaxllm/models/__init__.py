"""The model: configuration, parameters as records, and one decoder for a table of families.

May import `jaxllm.layers`.
"""
