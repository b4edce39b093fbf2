"""Random traits of simulated individuals: one value per image, (n, 1, 1) float32."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from maple.data.simulate.taxa import BROKEN, COLONY, FAMILIES, GIRDLE, OPPOSITE, TILTED, VIEWS, YOUNG, Taxon

Array = np.ndarray


class Traits(SimpleNamespace):
    """Traits of n images, by name: arrays (n, 1, 1)."""

    def select(self, rows: slice | Array) -> Traits:
        """Traits of some of the images, float32."""
        return Traits(**{name: np.asarray(values[rows], np.float32) for name, values in vars(self).items()})


class Sampler:
    """Draws random traits of n images whose taxa are given."""

    def __init__(self, taxa: tuple[Taxon, ...], labels: Array, rng: np.random.Generator) -> None:
        self.taxa, self.labels, self.rng = taxa, labels, rng

    def between(self, low: float | Array, high: float | Array) -> Array:
        """Uniform between two bounds, (n, 1, 1) float32."""
        return low + (high - low) * self.rng.random((len(self.labels), 1, 1), np.float32)

    def chance(self, probability: float | Array) -> Array:
        """True with the given probability, (n, 1, 1)."""
        return self.between(0.0, 1.0) < probability

    def trait(self, name: str) -> Array:
        """Trait of the taxon, or of its family, for each image, (n, 1, 1) float32; ranges become individual values."""
        owners = self.taxa if hasattr(self.taxa[0], name) else [FAMILIES[taxon.family] for taxon in self.taxa]
        table = np.array([getattr(owner, name) for owner in owners], np.float32)[self.labels]
        bounds = table.reshape(len(table), -1)[:, :, None, None]  # (n, 1 or 2, 1, 1)
        return bounds[:, 0] if table.ndim == 1 else self.between(bounds[:, 0], bounds[:, 1])

    def view(self) -> Array:
        """View of each image, drawn in the shares of its taxon, (n,) int64."""
        shares = np.array([[taxon.views.get(view, 0.0) for view in VIEWS] for taxon in self.taxa])
        upper = np.cumsum(shares, axis=1)[self.labels] / shares.sum(axis=1)[self.labels, None]  # (n, V)
        return (self.rng.random((len(self.labels), 1)) >= upper[:, :-1]).sum(axis=1, dtype=np.int64)


def sample_body(sampler: Sampler, view: Array) -> Traits:
    """Draw the outline of each individual in its view. ``view``: (n, 1, 1)."""
    between, trait = sampler.between, sampler.trait
    side, young, tilted = (view == GIRDLE) | (view == COLONY), view == YOUNG, view == TILTED
    # A division makes a cell shorter, not narrower: small cells are stout.
    length = trait("length") * np.where(young, between(0.5, 0.65), 1.0)
    aspect = trait("aspect") * np.where(tilted, between(0.55, 0.75), 1.0)
    aspect = np.where(young, np.minimum(aspect * between(1.4, 1.8), 1.0), aspect)
    corner = between(6.0, 10.0)
    return Traits(
        length=length,  # half-length
        width=length * np.where(side, trait("depth"), aspect),  # half-width
        pole=np.where(side, corner, trait("pole") * between(0.9, 1.1)),
        flank=np.where(side, corner, trait("flank") * between(0.95, 1.05)),
        taper=trait("taper") * between(0.7, 1.2),
        waist=np.where(side, 0.0, trait("waist") * between(0.8, 1.2)),
        bow=np.where(side, trait("bend"), trait("bow")) * between(0.75, 1.25),
        sigmoid=np.where(side, 0.0, trait("sigmoid") * between(0.7, 1.2)),
        warp=trait("warp") * between(0.3, 1.3),
        ripple=trait("ripple") * between(0.8, 1.2),
        phase=between(0.0, 2 * np.pi),  # of the irregularity
        cells=np.where(view == COLONY, np.floor(between(2.0, 4.6)), 1.0),  # side by side
        cut=np.where(view == BROKEN, between(-0.15, 0.25), 9.0),  # where a broken valve ends, from the centre
        cut_slope=between(-0.8, 0.8),
    )


def sample_marks(sampler: Sampler, view: Array) -> Traits:
    """Draw the marks of each individual in its view. ``view``: (n, 1, 1)."""
    between, trait = sampler.between, sampler.trait
    side, tilted, opposite = (view == GIRDLE) | (view == COLONY), view == TILTED, view == OPPOSITE
    return Traits(
        rim=trait("rim") * between(0.8, 1.25),
        glass=trait("glass") * between(0.6, 1.4),
        shade=np.where(tilted, between(0.6, 1.0), between(-0.2, 0.2)),  # one flank darker than the other
        period=trait("period") * between(0.92, 1.08),
        striae=trait("striae") * between(0.7, 1.2) * np.where(side, 0.6, 1.0),
        radiate=np.where(side, 0.0, trait("radiate")),
        slant=np.where(side, 0.0, trait("slant")),
        puncta=trait("puncta"),
        axial=np.where(side, 0.72, trait("axial") + np.where(opposite, 0.18, 0.0)),
        central=np.where(side, 0.0, trait("central")),
        centric=np.where(side, 0.0, trait("centric")),  # 0 or 1
        raphe=np.where(side | opposite, 0.0, trait("raphe")),
        raphe_at=trait("raphe_at") + np.where(tilted, 0.35, 0.0),
        fibulae=trait("fibulae"),
        bands=np.where(side, between(0.4, 1.0), np.where(tilted, 0.4, 0.0)),
        band_at=between(0.3, 0.6),
        plastids=np.where(sampler.chance(trait("plastids")), between(0.1, 0.45), 0.0),
        plastid_at=np.where(sampler.chance(0.5), between(0.3, 0.5), 0.0),
    )


def sample_scene(sampler: Sampler) -> Traits:
    """Draw position, light and optics, alike for all taxa, so that they carry no information about the class."""
    between, chance = sampler.between, sampler.chance
    inverted, defocused = chance(0.1), chance(0.08)
    return Traits(
        x=between(-0.1, 0.1),
        y=between(-0.1, 0.1),
        angle=between(0.0, 2 * np.pi),
        zoom=between(0.88, 1.12),
        contrast=np.exp(between(np.log(0.6), np.log(1.3))),
        focus=np.where(
            inverted, -between(0.4, 0.8), between(0.7, 1.1)
        ),  # negative: beyond the focal plane, where dark lines turn bright
        blur=np.where(defocused, between(0.04, 0.08), between(0.008, 0.035)),  # standard deviation of the defocus
        level=between(0.55, 0.85),
        gradient_x=between(-0.1, 0.1),
        gradient_y=between(-0.1, 0.1),
        vignette=between(0.0, 0.12),
        warmth=between(-0.04, 0.05),  # from blue (negative) to red light
        tint=between(-0.02, 0.02),  # from magenta (negative) to green light
        noise=between(0.005, 0.02),
    )


def sample_speck(sampler: Sampler) -> Traits:
    """Draw a speck or an elongated fragment anywhere; how often it is visible depends on the kind of object."""
    between, chance = sampler.between, sampler.chance
    return Traits(
        x=between(-1.0, 1.0),
        y=between(-1.0, 1.0),
        angle=between(0.0, np.pi),
        radius=between(0.015, 0.06),
        elongation=np.where(chance(0.2), between(2.0, 6.0), between(1.0, 1.5)),
        darkness=np.where(chance(sampler.trait("debris")), between(0.2, 0.8), 0.0),
    )
