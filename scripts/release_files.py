#!/usr/bin/env python3
"""Edits and writes the files of a release. scripts/release.sh calls it; it needs Python 3.9 and no package.

    release_files.py notes [VERSION]                prints the changelog's entries of a version (default: the unreleased ones)
    release_files.py bump VERSION DATE              sets the version everywhere; prints the files that it changed
    release_files.py asset TARGET                   prints what cargo-binstall expects: the archive's name, the binary's path in it
    release_files.py sbom TARGET OUTPUT             writes the bill of materials of the binary (CycloneDX 1.6, JSON)
    release_files.py licenses TARGET OUTPUT         writes the licenses of the third-party code in the binary

It works in the current directory, which is the root of the repository or of a copy. SOURCE_DATE_EPOCH is the time in the bill of
materials. The commands for a target call cargo.
"""

import json
import os
import re
import subprocess
import sys
import uuid
import zipfile
from datetime import datetime, timezone
from pathlib import Path

VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
PACKAGE_VERSION = re.compile(r'^(\[workspace\.package\]\n(?:[^\[].*\n)*?version = ")([^"]+)(")', re.MULTILINE)
UNRELEASED = re.compile(r"^## (\[?)Unreleased\]?[ \t]*$", re.MULTILINE | re.IGNORECASE)
# Files at the root of a crate that hold its license or a notice that has to travel with copies of it.
LICENSE_FILE = re.compile(r"(un)?licen[cs]e|copying|copyright|notice", re.IGNORECASE)


def number(version):
    return tuple(int(part) for part in version.split("."))


def current_version():
    found = PACKAGE_VERSION.search(Path("Cargo.toml").read_text())
    if not found:
        raise SystemExit("Cargo.toml: [workspace.package] has no version")
    return found[2]


# The changelog


def section(text, heading):
    """The text below a heading, up to the next version."""
    rest = text[heading.end() :]
    following = re.search(r"^## ", rest, re.MULTILINE)
    return rest[: following.start()] if following else rest


def released(text, version):
    return re.search(rf"^## \[?{re.escape(version)}\]?( |$).*$", text, re.MULTILINE)


def unreleased(text):
    """The heading of the unreleased entries, and the entries."""
    headings = list(UNRELEASED.finditer(text))
    if len(headings) != 1:
        raise SystemExit(f'CHANGELOG.md must have one heading "## [Unreleased]"; it has {len(headings)}')
    entries = section(text, headings[0])
    if not re.search(r"^[-*] \S", entries, re.MULTILINE):
        raise SystemExit("CHANGELOG.md has no entries under Unreleased: there is nothing to release")
    return headings[0], entries.strip()


def notes(version=None):
    text = Path("CHANGELOG.md").read_text()
    if version is None:
        return unreleased(text)[1]
    heading = released(text, version)
    if not heading:
        raise SystemExit(f"CHANGELOG.md has no section for version {version}")
    return section(text, heading).strip()


def changelog(text, version, date):
    """The changelog with the unreleased entries under the version and its date, and an empty Unreleased above."""
    if released(text, version):
        raise SystemExit(f"CHANGELOG.md has a section for version {version} already")
    heading, entries = unreleased(text)
    name = f"[{version}]" if heading[1] else version
    rest = text[heading.end() :][len(section(text, heading)) :]
    return f"{text[: heading.end()]}\n\n## {name} - {date}\n\n{entries}\n{rest and chr(10)}{rest}"


# The version


def bump(version, date):
    if not VERSION.fullmatch(version):
        raise SystemExit(f'"{version}" must have the form 1.2.3, which Rust and Python packages both accept')
    old = current_version()
    if number(version) < number(old):
        raise SystemExit(f"version {version} must not be lower than Cargo.toml's, which is {old}")
    edits = {Path("CHANGELOG.md"): changelog(Path("CHANGELOG.md").read_text(), version, date)}
    edits[Path("Cargo.toml")] = PACKAGE_VERSION.sub(rf"\g<1>{version}\g<3>", Path("Cargo.toml").read_text(), count=1)
    # A package without a source is a member of the workspace.
    member = re.compile(rf'^(\[\[package\]\]\nname = "[^"]+"\nversion = "){re.escape(old)}("\n)(?!source = )', re.MULTILINE)
    edits[Path("Cargo.lock")] = member.sub(rf"\g<1>{version}\g<2>", Path("Cargo.lock").read_text())
    # The document's own version is the first one. release.sh compares the file with what the new binary prints.
    document = Path("openapi/openapi.json")
    if document.is_file():
        edits[document] = document.read_text().replace(f'"version": "{old}"', f'"version": "{version}"', 1)
    # Names of release files in the documents, such as that of the wheel in an install command.
    for page in [Path("README.md"), Path("python/README.md"), *sorted(Path("docs").rglob("*.md"))]:
        if page.is_file():
            edits[page] = re.sub(rf"\brlood-{re.escape(old)}-", f"rlood-{version}-", page.read_text())
    changed = [path for path, text in edits.items() if path.read_text() != text]
    for path in changed:
        path.write_text(edits[path])
    return changed


# cargo-binstall


def asset(target):
    """The archive's file name and the binary's path in it, from [package.metadata.binstall] of Cargo.toml."""
    text = Path("Cargo.toml").read_text()
    found = re.search(r"^\[package\.metadata\.binstall\]\n((?:[^\[\n].*\n)+)", text, re.MULTILINE)
    settings = dict(re.findall(r'^([a-z-]+) = "([^"]*)"$', found[1] if found else "", re.MULTILINE))
    values = {"repo": "REPOSITORY", "name": "rlood", "bin": "rlood", "version": current_version(), "target": target}

    def render(key):
        try:
            return re.sub(r"\{ ([a-z-]+) \}", lambda name: values[name[1]], settings[key])
        except KeyError as error:
            raise SystemExit(f"Cargo.toml: {key} of [package.metadata.binstall] needs {error}")

    return render("pkg-url").rsplit("/", 1)[1], render("bin-dir")


# What is in the binary


def cargo(*arguments):
    return subprocess.run(["cargo", *arguments], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def linked_packages(target):
    """The packages whose code is in the binary, by id; for each the ids of those it uses; and what `bundled` finds.

    Macros and build scripts run in the build only and are left out.
    """
    tree = cargo(
        "tree", "--locked", "--package", "rlood", "--target", target, "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}"
    )  # fmt: skip
    linked = {tuple(line.split()[:2]) for line in tree.splitlines()}
    metadata = json.loads(cargo("metadata", "--locked", "--format-version", "1", "--filter-platform", target))
    packages = {package["id"]: package for package in metadata["packages"] if (package["name"], f"v{package['version']}") in linked}
    uses = {}
    for node in metadata["resolve"]["nodes"]:
        if node["id"] in packages:
            normal = (dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"]))
            uses[node["id"]] = sorted(set(normal) & packages.keys())
    if len(packages) != len(linked):
        raise SystemExit(f"cargo tree lists {len(linked)} packages and cargo metadata {len(packages)} of them")
    return packages, uses, list(bundled(metadata["packages"]))


def license_expression(package):
    # Old crates write "MIT/Apache-2.0".
    return (package["license"] or "").replace("/", " OR ")


def bundled(packages):
    """Code of other projects that crates and the dashboard carry: the crate it is in, its name, version, license and package URL."""
    for package in packages:
        folder = Path(package["manifest_path"]).parent
        if package["name"] == "libsqlite3-sys":
            header = (folder / "sqlite3/sqlite3.h").read_text(errors="replace")
            version = re.search(r'#define SQLITE_VERSION\s+"([^"]+)"', header)[1]
            yield package["name"], "sqlite", version, "blessing", f"pkg:generic/sqlite@{version}"
        if package["name"] == "zstd-sys":
            version = package["version"].split("+zstd.")[1]
            yield package["name"], "zstd", version, "BSD-3-Clause", f"pkg:generic/zstd@{version}"
        if package["name"] == "utoipa-swagger-ui-vendored":
            # Only the build reads this crate. The files of its archive are in the binary all the same.
            for archive in (folder / "res").glob("*.zip"):
                version = zipfile.ZipFile(archive).namelist()[0].split("/")[0].replace("swagger-ui-", "")
                yield "rlood", "swagger-ui", version, "Apache-2.0", f"pkg:npm/swagger-ui-dist@{version}"
    # A table row: | `file` | package version | license | …
    rows = re.findall(r"^\| `[^`]+` \| (\S+) (\d\S*) \| (\S+) \|", Path("web/vendor/README.md").read_text(), re.MULTILINE)
    for name, version, license_id in sorted(set(rows)):
        yield "rlood", name, version, license_id, f"pkg:npm/{name}@{version}"


def sbom(target, output):
    packages, uses, others = linked_packages(target)
    checksums = re.findall(r'^name = "(.+)"\nversion = "(.+)"\nsource = .*\nchecksum = "(.+)"$', Path("Cargo.lock").read_text(), re.MULTILINE)
    checksums = {(name, version): checksum for name, version, checksum in checksums}
    root = next(package["id"] for package in packages.values() if package["name"] == "rlood")
    # Local paths are no part of a reference: the same sources give the same document.
    refs = {key: f"{package['name']}@{package['version']}" for key, package in packages.items()}
    components = {}
    for key, package in packages.items():
        component = {"type": "library", "bom-ref": refs[key], "name": package["name"], "version": package["version"]}
        if package["source"]:
            component["purl"] = f"pkg:cargo/{package['name']}@{package['version'].replace('+', '%2B')}"
            component["hashes"] = [{"alg": "SHA-256", "content": checksums[package["name"], package["version"]]}]
        if package["license"]:
            component["licenses"] = [{"expression": license_expression(package)}]
        if package["repository"]:
            component["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
        components[refs[key]] = component
    depends = {refs[key]: {refs[used] for used in uses[key]} for key in packages}
    for carrier, name, version, license_id, purl in others:
        ref = f"bundled:{name}@{version}"
        components[ref] = {
            "type": "library", "bom-ref": ref, "name": name, "version": version, "purl": purl, "licenses": [{"license": {"id": license_id}}]
        }  # fmt: skip
        depends[ref] = set()
        depends[next(refs[key] for key, package in packages.items() if package["name"] == carrier)].add(ref)
    program = components.pop(refs[root])
    time = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {**program, "type": "application", "properties": [{"name": "rlood:target", "value": target}]},
        },
        "components": [components[ref] for ref in sorted(components)],
        "dependencies": [{"ref": ref, "dependsOn": sorted(depends[ref])} for ref in sorted(depends)],
    }
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))}"
    Path(output).write_text(json.dumps(document, indent=2) + "\n")
    return len(components)


def licenses(target, output):
    packages, _, others = linked_packages(target)
    foreign = sorted((package for package in packages.values() if package["source"]), key=lambda package: (package["name"], package["version"]))
    texts, without = {}, []
    for package in foreign:
        folder = Path(package["manifest_path"]).parent
        files = sorted(path for path in folder.iterdir() if path.is_file() and LICENSE_FILE.match(path.name))
        name = f"{package['name']} {package['version']} ({license_expression(package)})"
        for path in files:
            texts.setdefault(path.read_text(errors="replace").strip(), {}).setdefault(name)
        if not files:
            without.append(f"{name}: {package['repository'] or 'no repository named'}")
    with open(output, "w") as file:
        file.write("rlood contains code of these packages. Each license is printed once, below the packages that carry its text.\n")
        for text, names in sorted(texts.items(), key=lambda item: next(iter(item[1]))):
            file.write(f"\n{'=' * 80}\n" + "\n".join(names) + f"\n{'-' * 80}\n\n{text}\n")
        file.write(f"\n{'=' * 80}\nThese packages name their license but carry no text of it:\n\n" + "\n".join(without) + "\n")
        file.write(f"\n{'=' * 80}\nThese parts of other projects are included too:\n\n")
        file.write("".join(f"{name} {version} ({license_id})\n" for _, name, version, license_id, _ in others))
    return len(foreign)


def main():
    commands = {"notes": (notes, 0, 1), "bump": (bump, 2, 2), "asset": (asset, 1, 1), "sbom": (sbom, 2, 2), "licenses": (licenses, 2, 2)}
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    command, least, most = commands.get(name, (None, 0, 0))
    if command is None or not least <= len(arguments) <= most:
        raise SystemExit(__doc__.strip())
    result = command(*arguments)
    print(*(result if isinstance(result, (list, tuple)) else [result]), sep="\n")


if __name__ == "__main__":
    main()
