"""What a skill's folder owes the agents that load it: the format, the size, and references that can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quoted_commands import fences, without_fences

ROOT = Path(__file__).resolve().parents[2]
SKILLS = sorted(path.parent for path in (ROOT / "skills").glob("*/SKILL.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
STEPS = re.compile(r"(?i)\b(first|then|next|after that|finally|step \d|follow(ed)? by)\b")

pytestmark = pytest.mark.parametrize("skill", SKILLS, ids=lambda p: p.name)


def frontmatter(skill: Path) -> dict[str, object]:
    import yaml

    text = (skill / "SKILL.md").read_text(encoding="utf-8")
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert match, "no frontmatter"
    found = yaml.safe_load(match[1])
    assert isinstance(found, dict)
    return found


def links(page: Path) -> list[str]:
    found = LINK.findall(without_fences(page.read_text(encoding="utf-8")))
    return [link for link in found if not link.startswith(("http://", "https://", "mailto:"))]


def test_the_format_is_what_the_reference_validator_accepts(skill: Path) -> None:
    import skills_ref  # slow to import, and needed here only

    assert skills_ref.validate(skill) == []


def test_the_name_is_the_folder_and_the_description_says_what_and_when_without_steps(skill: Path) -> None:
    found = frontmatter(skill)
    description = found["description"]
    assert found["name"] == skill.name
    assert isinstance(description, str)
    assert 100 <= len(description) <= 1024
    ability, when, _ = description.partition("Use it when")
    assert when, "it does not say when to use the skill"
    assert ability.strip().count(". ") == 0, "the ability is one clause"
    assert not STEPS.search(ability), "steps in a description are followed in place of the body"
    assert "`" not in description and "--" not in description


def test_the_body_is_short_enough_to_be_read_whole(skill: Path) -> None:
    assert len((skill / "SKILL.md").read_text(encoding="utf-8").splitlines()) < 500


def test_every_link_leads_to_a_file_inside_the_skill(skill: Path) -> None:
    for page in [skill / "SKILL.md", *skill.glob("references/*")]:
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            assert target.is_file(), f"{page.name}: {link}"
            assert skill.resolve() in target.parents, f"{page.name}: {link} leaves the skill, which is installed alone"


def test_references_are_one_hop_away_and_the_body_says_when_to_open_each(skill: Path) -> None:
    linked = {Path(link).name for link in links(skill / "SKILL.md")}
    body = " ".join(without_fences((skill / "SKILL.md").read_text(encoding="utf-8")).split())
    for reference in skill.glob("references/*"):
        assert reference.is_file(), "a reference is a file beside the others, not a folder"
        assert reference.name in linked, f"{reference.name} is not linked from SKILL.md"
        sentence = re.search(rf"Open \[[^\]]*\]\(references/{re.escape(reference.name)}\) (when|for|before) ", body)
        assert sentence, f"the body does not say when to open {reference.name}"
        assert links(reference) == [], f"{reference.name} links on: a second hop is not followed"


def test_it_is_listed_where_agents_look_for_it(skill: Path) -> None:
    assert f"skills/{skill.name}/SKILL.md" in (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert (ROOT / ".claude" / "skills" / skill.name / "SKILL.md").is_file()


def test_it_does_not_shout(skill: Path) -> None:
    for page in [skill / "SKILL.md", *skill.glob("references/*")]:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"\b(NEVER|ALWAYS|MUST|IMPORTANT|CRITICAL|WARNING)\b", text), page.name
        assert all(fence.language for fence in fences(text)), f"{page.name}: a block without a language"
