#!/usr/bin/env bash
# Counts what docs/contributing/style.md asks writers to avoid, in src, crates, web, docs and openapi, and fails where a count is above
# its limit.
#
#   scripts/english.sh            prints the counts
#   scripts/english.sh --list     prints the lines too
set -euo pipefail
cd "$(dirname "$0")/.."
list=${1:-}
failed=0
mapfile -t files < <(git ls-files --cached --others --exclude-standard -- src crates web docs openapi \
    | grep -v '^docs/contributing/style.md$' | grep -vE '\.(png|svg|ico|json\.br|lock|safetensors|bin)$|/fixtures/')
mapfile -t rust < <(printf '%s\n' "${files[@]}" | grep '\.rs$')

# Prints the count of a rule, and fails the run above its limit. Standard input: the lines.
rule() {
    local name=$1 limit=$2 lines count mark=ok
    lines=$(cat)
    count=$(grep -c . <<<"$lines" || true)
    ((count <= limit)) || mark="ABOVE THE LIMIT" failed=1
    printf '%-58s %5d  limit %3d  %s\n' "$name" "$count" "$limit" "$mark"
    if [[ $list || $count -gt $limit ]] && ((count)); then
        if [[ $list ]]; then sed 's/^/    /' <<<"$lines"; else head -5 <<<"$lines" | sed 's/^/    /'; fi
    fi
}

# The lines of comments that match a pattern and begin their comment.
first_lines() {
    awk -v pattern="$1" '
        FNR == 1 { before = 0 }
        { comment = $0 ~ /^[ \t]*\/\// }
        comment && !before && $0 ~ pattern { print FILENAME ":" FNR ":" $0 }
        { before = comment }' "${rust[@]}" "${scripts[@]}"
}
mapfile -t scripts < <(printf '%s\n' "${files[@]}" | grep -E '\.(js|mjs|cu|cuh|h)$')

rule 'comments that begin with "What"' 10 < <(grep -nE '^\s*(//[/!]?|\*|/\*\*|<!--) ?What ' "${files[@]}" || true)
rule "comments whose first line begins with a preposition" 10 < <(first_lines '^[ \t]*///? (Of|By|For|From|In|To|With|At|On|As) ')
# A heading such as "# Errors" is no comment of its own.
rule "lines of doc comments with three words or fewer" 100 < <(grep -nE '^\s*///( [^ ]+){1,3}$' "${rust[@]}" | grep -vE '/// #+ ' || true)
rule "nobody, somebody, whoever" 10 < <(grep -niwE 'nobody|somebody|whoever' "${files[@]}" || true)

# Names that were retired. A string, such as a metric's name or a route, and a comment are no names.
retired='Cut|Held|Beat|beat|news|letters|Mailbox|errand|courier|keep_house|LOOK|TRIES|Surroundings|Ungenerated|Unprobed'
rule "retired names in Rust" 0 < <(
    awk -v pattern="$retired" '
        {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "", line)
            sub(/\/\/.*/, "", line)
        }
        line ~ "(^|[^A-Za-z0-9_])(" pattern ")([^A-Za-z0-9_]|$)" { print FILENAME ":" FNR ":" $0 }' "${rust[@]}"
)
rule "phrases of scripts/english-phrases.txt" 0 < <(grep -nFf <(grep -vE '^(#|$)' scripts/english-phrases.txt) "${files[@]}" README.md || true)
exit $failed
