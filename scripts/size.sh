#!/bin/bash
# How large the project is: lines, numeric constants, words, known gaps, and functions that are too long or too wide.
#
#   scripts/size.sh [DIR]     of another work tree
#
# What each count is:
#   product      lines (also blank ones and comments) of src and build.rs in host, vmm and guest, without what only
#                tests compile
#   tests        all other lines of Rust there: items under #[cfg(test)], the files of such modules, tests, examples
#   lab          all lines of Rust in lab
#   constants    `const` and `static` items of the product with a number, a duration or a unit as their type, or an
#                array of these, in pager, heat, policy, tier, agent and ranges
#   words        of Markdown, as `wc -w` counts them: code blocks and tables, too
#   known gaps   entries of docs/gaps.md
#   long         functions of the product of more than 70 lines, from `fn` to the closing brace
#   wide         functions of the product with more than six parameters, `self` not counted, parts of tuples counted
#   strings      places in the product where an error is only text: `Result<..., String>`
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

# Rust files of the product. A module that is declared under #[cfg(test)] is no part of it, nor is what lies below it.
product_files() {
    local all tests
    all=$(find host vmm guest -path '*/src/*' -name '*.rs' -o -path '*/build.rs' | sort)
    tests=$(echo "$all" | xargs awk '
        /^ *#\[cfg\(test\)\]/ { waits = 1; next }
        waits && /^ *#\[/ { next }
        waits && match($0, /mod [a-z_0-9]+;/) {
            name = substr($0, RSTART + 4, RLENGTH - 5)
            room = FILENAME
            if (room !~ /\/(lib|main|mod)\.rs$/) sub(/\.rs$/, "/", room); else sub(/[^\/]*$/, "", room)
            print room name ".rs"; print room name "/"
        }
        { waits = 0 }')
    echo "$all" | grep -vF "${tests:-//}"
}

# The product's lines alone, each as FILE<tab>LINE. An item under #[cfg(test)] ends where rustfmt puts its last brace.
product_lines() {
    product_files | xargs awk '
        function indent() { match($0, /^ */); return RLENGTH }
        FNR == 1 { skips = 0; waits = 0 }
        skips { if (indent() == depth && /^ *[})\]]+[;,]?$/) skips = 0; next }
        /^ *#\[cfg\((test|all\(test)/ { waits = 1; next }
        waits && /^ *(#\[|\/\/)/ { next }
        waits { waits = 0; if (!/[;}]$|,$/) { skips = 1; depth = indent() } next }
        { print FILENAME "\t" $0 }'
}

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
product_lines >"$lines"
count() { find "$@" -name '*.rs' -print0 | xargs -0 cat | wc -l; }
words() { cat "$@" | wc -w; }
number='([ui](8|16|32|64|128|size)|f(32|64)|Duration|Bytes|PageCount|PageIdx|Atomic[UI][0-9a-z]+)'
item='^(host|guest)/(pager|heat|policy|tier|agent|ranges)/[^	]*	 *(pub(\([a-z:]+\))? )?(const|static) [A-Z0-9_]+: '
item="$item(\[|&\[)*$number\b"
# Prints how many functions are `long`, and how many are `wide`.
functions() {
    awk -F '\t' '
        # How many names a list of parameters binds.
        function names(list,    at, depth, letter, found, type) {
            depth = 0; found = 0; type = 0
            for (at = 1; at <= length(list); at++) {
                letter = substr(list, at, 1)
                if (letter == "-" && substr(list, at, 2) == "->") { at++; continue }
                if (letter ~ /[(<\[{]/) depth++
                if (letter ~ /[)>\]}]/) depth--
                if (letter == ":" && substr(list, at, 2) == "::") { at++; continue }
                if (letter == ":" && depth == 0) { type = 1; found += bound(pattern); pattern = ""; continue }
                if (letter == "," && depth == 0) { type = 0; pattern = ""; continue }
                if (!type) pattern = pattern letter
            }
            pattern = ""
            return found
        }
        function bound(text) { sub(/,[ \n]*\)/, ")", text); return gsub(/,/, ",", text) + 1 }
        function end_of(text,    at, depth, letter) {
            for (at = 1; at <= length(text); at++) {
                letter = substr(text, at, 1)
                if (letter == "(") depth++
                if (letter == ")" && --depth == 0) return at
            }
            return 0
        }
        {
            line = $0; sub(/^[^\t]*\t/, "", line)
            if (!in_head && line ~ /^ *([a-z]+(\([a-z:]+\))? |extern "C" )*fn [a-z_0-9]+/) {
                in_head = 1; head = line; sub(/^.*fn [a-z_0-9]+(<.*>)?\(/, "(", head)
                if (head !~ /^\(/) { head = line; sub(/^[^(]*/, "", head) }
                match(line, /^ */); depth_of = RLENGTH; from = NR
            } else if (in_head) head = head " " line
            if (in_head && (to = end_of(head))) {
                if (names(substr(head, 2, to - 2)) > 6) wide++
                in_head = 0
            }
            if (from) {
                match(line, /^ */)
                if (RLENGTH == depth_of && line ~ /^ *}/) { if (NR - from + 1 > 70) long++; from = 0 }
                else if (NR == from && line ~ /[;}]$/) from = 0
            }
        }
        END { print long + 0, wide + 0 }' "$lines"
}
product=$(wc -l <"$lines")
read -r long wide < <(functions)
row() { printf '%-44s %s\n' "$1" "$2"; }
row 'product (lines)' "$product"
row 'tests (lines)' $(($(count host vmm guest) - product))
row 'lab (lines)' "$(count lab)"
row 'constants of six crates' "$(grep -cE "$item" "$lines")"
row 'ARCHITECTURE (words)' "$(words ARCHITECTURE.md)"
row 'docs (words)' "$(words docs/*.md)"
row 'all prose (words)' "$(git ls-files -z '*.md' | xargs -0 cat | wc -w)"
row 'known gaps' "$(grep -cE '^[0-9]+\. ' docs/gaps.md)"
row 'functions over 70 lines' "$long"
row 'functions over 6 parameters' "$wide"
row 'Result<_, String>' "$(grep -coE 'Result<.*, String>' "$lines")"
