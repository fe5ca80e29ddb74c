"""Dots on the surface that a rolling probe touches (Connolly 1983), with their normals.

The surface has three parts: convex dots on atoms, saddle dots where the probe touches two atoms, and concave dots where
it rests on three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastfold.protein.geometry import unit_vectors

_BATCH = 256  #: Points that share their neighbours
_CLOSE = 3.0  #: Distance in Å within which a nearest point is searched first
_TURNS = 36  #: Places of a probe around two atoms, one of them free if their saddle has dots


@dataclass(frozen=True)
class DotSurface:
    """Dots of a surface."""

    points: np.ndarray  #: ``[D, 3]`` in Å
    normals: np.ndarray  #: ``[D, 3]``, of length 1, away from the atoms
    probes: np.ndarray  #: ``[D, 3]``, centre in Å of the probe that touches each dot
    areas: np.ndarray  #: ``[D]`` in Å²


def sphere_points(count: int) -> np.ndarray:
    """Return ``[count, 3]`` points on a sphere of radius 1, spread evenly along a spiral."""
    height = 1.0 - (2.0 * np.arange(count) + 1.0) / count
    turn = np.pi * (3.0 - np.sqrt(5.0)) * np.arange(count)
    ring = np.sqrt(1.0 - height**2)
    return np.stack([ring * np.cos(turn), ring * np.sin(turn), height], -1)


def touches(points: np.ndarray, centers: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Return ``[P]`` bool, True for points ``[P, 3]`` nearer to any of ``centers [C, 3]`` than its ``reach [C]``."""
    is_near = np.zeros(len(points), bool)
    for part, near in _neighbors(points, centers, reach):
        is_near[part] = (_squared(points[part], centers[near]) < reach[near] ** 2).any(-1)
    return is_near


def nearest(points: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return index and squared distance, ``[P]``, of the nearest of ``others [O, 3]`` to ``points [P, 3]``."""
    index, squared = np.zeros(len(points), np.int64), np.full(len(points), np.inf)

    def compare(part: np.ndarray, near: np.ndarray) -> None:
        distances = _squared(points[part], others[near])
        index[part] = near[distances.argmin(-1)]
        squared[part] = distances.min(-1)

    for part, near in _neighbors(points, others, np.full(len(others), _CLOSE)):
        compare(part, near)
    far = np.flatnonzero(squared > _CLOSE**2)
    for start in range(0, len(far), _BATCH):
        compare(far[start : start + _BATCH], np.arange(len(others)))
    return index, squared.clip(0.0)


def dot_surface(
    centers: np.ndarray, radii: np.ndarray, chosen: np.ndarray, *, probe: float, density: float
) -> DotSurface:
    """Return the dots of the ``chosen`` atoms of a molecule; its other atoms only keep the probe away.

    Args:
        centers: Atoms ``[A, 3]`` in Å.
        radii: Their radii ``[A]`` in Å.
        chosen: ``[A]`` bool.
        probe: Radius of the probe in Å.
        density: Dots in Å^-2.
    """
    near = np.flatnonzero(touches(centers, centers[chosen], np.full(chosen.sum(), 2 * (radii.max() + probe))))
    atoms = _Atoms(centers[near], radii[near] + probe, chosen[near], probe, density)
    pairs = atoms.pairs()
    parts = [atoms.convex(), atoms.saddles(pairs), atoms.concave(pairs)]
    joined = [np.concatenate(one) for one in zip(*parts, strict=True)]
    return DotSurface(*joined)


_Dots = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Atoms:
    """Atoms with radii grown by the probe's, on whose spheres the probe's centre rolls."""

    centers: np.ndarray
    grown: np.ndarray
    chosen: np.ndarray
    probe: float
    density: float

    def pairs(self) -> np.ndarray:
        """Return indices ``[K, 2]`` of atoms that the probe can touch together, one of them chosen."""
        apart = np.sqrt(_squared(self.centers, self.centers).clip(0.0))
        meets = (apart < self.grown[:, None] + self.grown) & (apart > abs(self.grown[:, None] - self.grown))
        meets &= self.chosen[:, None] | self.chosen
        return np.argwhere(np.triu(meets, 1))

    def is_free(self, probes: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Return which probes ``[P, 3]`` overlap no atom but their ``owners [P, k]``."""
        free = np.ones(len(probes), bool)
        for part, near in _neighbors(probes, self.centers, self.grown):
            inside = _squared(probes[part], self.centers[near]) < self.grown[near] ** 2
            is_owner = (owners[part][:, :, None] == near).any(1)
            free[part] = ~(inside & ~is_owner).any(-1)
        return free

    def convex(self) -> _Dots:
        """Return dots on the atoms themselves."""
        dots = []
        for atom in np.flatnonzero(self.chosen):
            radius = self.grown[atom] - self.probe
            area = 4.0 * np.pi * radius**2
            count = max(int(area * self.density), 1)
            normals = sphere_points(count)
            probes = self.centers[atom] + self.grown[atom] * normals
            others = (
                _squared(self.centers[atom : atom + 1], self.centers)[0]
                < (self.grown[atom] + self.grown) ** 2
            )
            others[atom] = False
            free = ~touches(probes, self.centers[others], self.grown[others])
            points = self.centers[atom] + radius * normals[free]
            dots.append((points, normals[free], probes[free], np.full(free.sum(), area / count)))
        return _join(dots)

    def saddles(self, pairs: np.ndarray) -> _Dots:
        """Return dots of the probe while it rolls along two atoms."""
        middle, axis, radius = self._circles(pairs)
        across = _perpendicular(axis)
        other = np.cross(axis, across)
        meets = _squared(self.centers, self.centers) < (self.grown[:, None] + self.grown) ** 2
        np.fill_diagonal(meets, False)
        some = 2.0 * np.pi * np.arange(_TURNS) / _TURNS
        coarse = np.stack([np.cos(some), np.sin(some)], -1)
        dots = []
        for k, (i, j) in enumerate(pairs):
            # A probe at middle + radius * outward overlaps a third atom if this is negative.
            third = np.flatnonzero(meets[i] & meets[j])
            apart = middle[k] - self.centers[third]
            rest = (apart**2).sum(-1) + radius[k] ** 2 - self.grown[third] ** 2
            plane = np.stack([across[k], other[k]])
            slope = plane @ (2.0 * radius[k] * apart).T
            if not (coarse @ slope + rest >= 0).all(-1).any():
                continue
            tilt, angle, area = self._torus(k, i, j, (middle, axis, radius))
            turned = np.stack([np.cos(angle), np.sin(angle)], -1)
            free = (turned @ slope + rest >= 0).all(-1)
            outward, tilt, area = turned[free] @ plane, tilt[free], area[free]
            probes = middle[k] + radius[k] * outward
            toward = np.sin(tilt)[:, None] * axis[k] - np.cos(tilt)[:, None] * outward
            dots.append((probes + self.probe * toward, -toward, probes, area))
        return _join(dots)

    def _torus(
        self, k: int, i: int, j: int, circles: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tilt, turn and area of dots on the whole torus between atoms ``i`` and ``j``.

        The tilt, seen from the probe, is 0 toward the axis; the turn is around the axis.
        """
        middle, axis, radius = (x[k] for x in circles)
        step = 1.0 / np.sqrt(self.density)
        low, high = (np.arctan2((self.centers[one] - middle) @ axis, radius) for one in (i, j))
        count = max(round(float(high - low) * self.probe / step), 1)
        tilts = low + (high - low) * (np.arange(count) + 0.5) / count
        distances = radius - self.probe * np.cos(
            tilts
        )  # to the axis; dots beyond it are inside the other side
        tilts, distances = tilts[distances > 0], distances[distances > 0]
        turns = np.ceil(2.0 * np.pi * distances / step).astype(int)
        row = np.repeat(np.arange(len(tilts)), turns)
        place = np.arange(len(row)) - np.repeat(np.cumsum(turns) - turns, turns)
        width = self.probe * (high - low) / count
        return (
            tilts[row],
            2.0 * np.pi * (place + 0.5) / turns[row],
            width * (2.0 * np.pi * distances / turns)[row],
        )

    def concave(self, pairs: np.ndarray) -> _Dots:
        """Return dots of the probe where it rests on three atoms."""
        triples = self._triples(pairs)
        probes, owners = self._resting(triples)
        free = self.is_free(probes, owners)
        probes, owners = probes[free], owners[free]
        area = 4.0 * np.pi * self.probe**2
        count = int(area * self.density)
        toward = sphere_points(count)
        arms = self.centers[owners] - probes[:, None]
        sides = np.stack([np.cross(arms[:, a], arms[:, b]) for a, b in ((0, 1), (1, 2), (2, 0))], 1)
        hand = np.sign(np.einsum("pk,pk->p", sides[:, 0], arms[:, 2]))
        inside = (np.einsum("psk,dk->pds", sides, toward) * hand[:, None, None] > 0).all(-1)
        probe, dot = np.nonzero(inside)
        points = probes[probe] + self.probe * toward[dot]
        # Where probes overlap, the surface is that of the nearer one.
        kept = ~touches(points, probes, np.full(len(probes), self.probe - 1e-6))
        probe, dot = probe[kept], dot[kept]
        return points[kept], -toward[dot], probes[probe], np.full(kept.sum(), area / count)

    def _circles(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return middle ``[K, 3]``, axis ``[K, 3]`` and radius ``[K]`` of the probe's way around pairs."""
        first, second = self.centers[pairs[:, 0]], self.centers[pairs[:, 1]]
        one, two = self.grown[pairs[:, 0]], self.grown[pairs[:, 1]]
        apart = np.linalg.norm(second - first, axis=-1)
        axis = (second - first) / apart[:, None]
        along = (apart**2 + one**2 - two**2) / (2.0 * apart)
        return first + along[:, None] * axis, axis, np.sqrt((one**2 - along**2).clip(0.0))

    def _triples(self, pairs: np.ndarray) -> np.ndarray:
        meets = np.zeros((len(self.centers), len(self.centers)), bool)
        meets[pairs[:, 0], pairs[:, 1]] = True
        both = meets | meets.T
        dots = [
            np.column_stack([np.tile([i, j], (len(k), 1)), k])
            for i, j in pairs
            for k in [np.flatnonzero(both[i] & both[j])]
            for k in [k[k > j]]
        ]
        return np.concatenate([np.zeros((0, 3), np.int64), *dots])

    def _resting(self, triples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return centres ``[P, 3]`` of probes that touch three atoms, and these atoms ``[P, 3]``."""
        a, b, c = (self.centers[triples[:, n]] for n in range(3))
        one, two, three = (self.grown[triples[:, n]] for n in range(3))
        # Trilateration in the frame of the atoms.
        x = unit_vectors(b - a)
        along = np.einsum("tk,tk->t", x, c - a)
        across = c - a - along[:, None] * x
        y = unit_vectors(across)
        height = np.linalg.norm(across, axis=-1)
        apart = np.linalg.norm(b - a, axis=-1)
        px = (one**2 - two**2 + apart**2) / (2.0 * apart)
        py = (one**2 - three**2 + along**2 + height**2 - 2.0 * along * px) / (2.0 * height.clip(1e-9))
        squared = one**2 - px**2 - py**2
        meets = (squared > 0) & (height > 1e-6)
        base = (a + px[:, None] * x + py[:, None] * y)[meets]
        rise = np.sqrt(squared[meets])[:, None] * np.cross(x, y)[meets]
        return np.concatenate([base + rise, base - rise]), np.tile(triples[meets], (2, 1))


def _squared(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return squared distances ``[P, O]``."""
    middle = others.mean(0)
    a, b = points - middle, others - middle
    return (a**2).sum(-1)[:, None] + (b**2).sum(-1) - 2.0 * (a @ b.T)


def _neighbors(
    points: np.ndarray, centers: np.ndarray, reach: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield indices of points, and of the centers that may be within reach of one of them."""
    if not len(points) or not len(centers):
        return
    order, places = points[:, 0].argsort(), centers[:, 0].argsort()
    along, longest = centers[places, 0], reach.max()
    for start in range(0, len(points), _BATCH):
        part = order[start : start + _BATCH]
        low, high = points[part[[0, -1]], 0]
        near = places[slice(*np.searchsorted(along, [low - longest, high + longest]))]
        bounds = points[part].min(0) - longest, points[part].max(0) + longest
        near = near[((centers[near] >= bounds[0]) & (centers[near] <= bounds[1])).all(-1)]
        if len(near):
            yield part, near


def _perpendicular(axis: np.ndarray) -> np.ndarray:
    """Return a direction of length 1 perpendicular to each of ``axis [K, 3]``."""
    seed = np.eye(3)[np.abs(axis).argmin(-1)]
    return unit_vectors(np.cross(axis, seed))


def _join(dots: list[_Dots]) -> _Dots:
    empty = (np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
    points, normals, probes, areas = (np.concatenate(one) for one in zip(empty, *dots, strict=True))
    return points, normals, probes, areas
