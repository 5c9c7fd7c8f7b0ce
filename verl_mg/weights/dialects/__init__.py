"""How each framework names, fuses and cuts the tensors of a model: one line a parameter."""
