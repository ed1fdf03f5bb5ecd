"""Which offers fit: a table of literals, and the table that explains what fell."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gpu_skills.providers.base import Offer, Requirements
from gpu_skills.providers.gpus import canonical, same_model, size_class_gb
from gpu_skills.providers.selection import in_words, select

OFFER = Offer(
    provider="vast",
    offer_id="1",
    rate_usd_hr=Decimal("0.40"),
    gpu="RTX 4090",
    gpu_count=1,
    vram_gb=24,
    max_disk_gb=500,
    reliability=0.99,
    down_mbps=900,
    location="Sweden, SE",
    duration_h=48,
    cuda=12.8,
    is_verified=True,
)


@pytest.mark.parametrize(
    ("need", "offer", "removed_by"),
    [
        ({}, {}, None),
        ({"gpu": "RTX_4090"}, {}, None),
        ({"gpu": "H100"}, {}, "gpu"),
        ({"gpu": "H100", "candidates": ("RTX 4090",)}, {}, None),
        ({"gpu": "A100 80GB"}, {"gpu": "A100 SXM4", "vram_gb": 40}, "gpu"),
        ({"gpu": "A100 80GB"}, {"gpu": "A100 SXM4", "vram_gb": 80}, None),
        ({"gpu_count": 2}, {}, "gpu_count"),
        ({}, {"gpu_count": 2}, "gpu_count"),
        ({}, {"stock": "NONE"}, "stock"),
        ({}, {"stock": "LOW"}, None),
        ({}, {"is_verified": False}, "verified"),
        ({}, {"is_verified": None}, None),
        ({}, {"is_interruptible": True}, "kind"),
        ({"interruptible": True}, {}, "kind"),
        ({"min_vram_gb": 24}, {}, None),
        ({"min_vram_gb": 24}, {"vram_gb": 23}, None),
        ({"min_vram_gb": 24}, {"vram_gb": 16}, "min_vram_gb"),
        ({"min_vram_gb": 24}, {"vram_gb": None}, "min_vram_gb"),
        ({"disk_gb": 500}, {}, None),
        ({"disk_gb": 501}, {}, "disk_gb"),
        ({"disk_gb": 501}, {"max_disk_gb": None}, None),
        ({"min_cuda": 12.8}, {}, None),
        ({"min_cuda": 13.0}, {}, "cuda"),
        ({"min_cuda": 12.0}, {"cuda": None}, "cuda"),
        ({}, {"has_direct_ssh": False}, "ssh"),
        ({}, {"reliability": 0.94}, "reliability"),
        ({}, {"reliability": None}, None),
        ({"min_reliability": 0.5}, {"reliability": 0.94}, None),
        ({"min_down_mbps": 500}, {"down_mbps": 80}, "min_down_mbps"),
        ({"min_down_mbps": 500}, {"down_mbps": 900}, None),
        ({"min_down_mbps": 500}, {"down_mbps": None}, "min_down_mbps"),
        ({"locations": ("se", "FI")}, {}, None),
        ({"locations": ("US",)}, {}, "location"),
        ({"locations": ("EU",)}, {"location": "US-TX-3, EU-RO-1"}, None),
        ({"locations": ("EU-RO-1",)}, {"location": "EU-RO-10"}, "location"),
        ({"locations": ("SE",)}, {"location": None}, "location"),
        ({"hours": 12}, {"duration_h": 5}, "too_short"),
        ({"hours": 12}, {"duration_h": None}, None),
        ({"max_rate_usd_hr": Decimal("0.40")}, {}, None),
        ({"max_rate_usd_hr": Decimal("0.3999")}, {}, "max_rate"),
    ],
)
def test_an_offer_stays_or_falls_by_one_requirement(need, offer, removed_by):
    search = select([replace(OFFER, **offer)], Requirements(**need))
    assert [row.filter for row in search.filters if row.removed] == ([removed_by] if removed_by else [])
    assert len(search.offers) == (0 if removed_by else 1)


def test_the_table_counts_down_filter_by_filter_and_the_cheapest_comes_first():
    offers = [
        replace(OFFER, offer_id="slow", down_mbps=80, rate_usd_hr=Decimal("0.10")),
        replace(OFFER, offer_id="dear", rate_usd_hr=Decimal("0.90")),
        replace(OFFER, offer_id="fair", rate_usd_hr=Decimal("0.30")),
        replace(OFFER, offer_id="good", rate_usd_hr=Decimal("0.20")),
        replace(OFFER, offer_id="old", gpu="RTX 3090"),
    ]
    need = Requirements(gpu="RTX 4090", min_down_mbps=500, max_rate_usd_hr=Decimal("0.5"))
    search = select(offers, need, unreadable=2)
    assert [offer.offer_id for offer in search.offers] == ["good", "fair"]
    assert search.considered == 7
    told = [(row.filter, row.removed, row.left) for row in search.filters if row.removed]
    assert told == [("readable", 2, 5), ("gpu", 1, 4), ("min_down_mbps", 1, 3), ("max_rate", 1, 2)]
    assert "min_down_mbps (500 Mb/s or more) removed 1, 3 left" in in_words(search.filters)
    assert in_words([]) == "the provider has none"


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx_4090", "RTX 4090", True),
        ("4090", "RTX 4090", True),
        ("RTX 4090", "RTX 4090D", False),
        ("RTX 3090", "RTX 3090 Ti", False),
        ("RTX 3090 Ti", "RTX 3090", False),
        ("RTX 4070 Ti", "RTX 4070S Ti", False),
        ("RTX 4070 Ti Super", "RTX 4070S Ti", True),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100 SXM", "H100 NVL", False),
        ("A100 SXM4", "A100 SXM", True),
        ("A100 80GB", "NVIDIA A100 80GB PCIe", True),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("RTX 6000 Ada", "RTX 6000Ada", True),
        ("RTX A6000", "RTX 6000Ada", False),
        ("RTX 6000", "RTX PRO 6000 WS", False),
        ("L40", "L40S", False),
        ("T4", "Tesla T4", True),
        ("", "RTX 4090", False),
        ("GPU", "RTX 4090", False),
    ],
)
def test_a_model_is_recognised_however_it_is_spelt(wanted, found, same):
    assert same_model(wanted, found) is same


@pytest.mark.parametrize(
    ("mib", "gb"),
    [
        (24564, 24),
        (24576, 24),
        (23034, 24),
        (15360, 16),
        (16376, 16),
        (46068, 48),
        (81559, 80),
        (97887, 96),
        (12288, 12),
    ],
)
def test_a_card_is_of_the_size_it_is_sold_as(mib, gb):
    assert size_class_gb(mib) == gb


def test_names_are_shown_short():
    assert [canonical(n) for n in ("NVIDIA GeForce RTX 4090", "Tesla V100", "H100 SXM")] == [
        "RTX 4090",
        "V100",
        "H100 SXM",
    ]
