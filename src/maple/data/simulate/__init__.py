"""Simulated diatoms: taxa (tables), traits (random individuals), drawing (pixels) and the data set made of them."""
