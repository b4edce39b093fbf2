"""Simulated diatoms: taxa (tables), traits (random individuals), drawing (pixels) and the data set made of them."""

from maple.data.simulate.diatoms import LARGEST, SMALLEST, SimulatedImages, simulated_diatoms

__all__ = ["LARGEST", "SMALLEST", "SimulatedImages", "simulated_diatoms"]
