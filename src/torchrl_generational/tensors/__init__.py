"""What PyTorch does with the tensors that a buffer keeps.

Default devices, autograd's modes, compiled code, dtypes that PyTorch stores and does not index, and tensors of the CPU
seen as NumPy arrays. Each is asked about here and nowhere else. Knows PyTorch, and nothing of this package.
"""
