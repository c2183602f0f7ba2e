"""Structured output: text that follows a JSON schema, a regular expression, a choice or a grammar.

The package llguidance (Microsoft, MIT licence; `pip install 'jaxllm[structured]'`) knows which tokens may come next;
here is what the engine needs of it: compiled grammars, the state of a request, bit masks. It is imported where a
grammar is compiled, not before. Imports nothing of jaxllm.
"""
