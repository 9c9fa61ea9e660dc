//! Templates that would take all memory, all stack or all time, for the tests of both kinds.

use std::time::{Duration, Instant};

const MADE: &str = "the template makes more than ";
const CONSTANTS: &str = "MiB of constants";
const FUEL: &str = "fuel";
const DEEP: &str = "nested too deeply";

/// `x` is a text of 16 bytes, `l` a list of it, `m` a map of both, each made such that nobody computes them while compiling.
const VALUES: &str = "{% set x = '0123456789abcdef'|upper %}{% set l = [x] %}{% set m = {'k': x, 'l': l} %}";

/// A template, and what its error says.
const BOMBS: &[(&str, &str)] = &[
    // Formats and paddings.
    ("{{ '%9000000000d'|format(1) }}", MADE),
    ("{{ '%*d'|format(9000000000, 1) }}", MADE),
    ("{{ '%.*f'|format(9000000000, 1.5) }}", MADE),
    ("{{ '%(k)9000000000s'|format(k=1) }}", MADE),
    ("{{ '%9000000000s'|safe|format(1) }}", MADE),
    ("{{ '{:9000000000}'.format(1) }}", MADE),
    ("{{ '{0:x>9000000000}'.format(1) }}", MADE),
    ("{{ ('{0}' * 100000).format(x * 100000) }}", MADE),
    ("{{ 'a'|indent(1000000000) }}", MADE),
    ("{{ 'a'|indent(width=1000000000) }}", MADE),
    ("{{ ('a\n' * 100000)|indent(100000) }}", MADE),
    ("{{ 'a'.center(1000000000) }}", "no method"),
    ("{{ 'a'.ljust(1000000000) }}", "no method"),
    ("{{ 'a'.zfill(1000000000) }}", "no method"),
    ("{{ 'a'.expandtabs(1000000000) }}", "no method"),
    ("{{ ['a']|map('center', 1000000000)|list }}", "filter"),
    ("{{ ['a']|map('indent', 1000000000)|list }}", MADE),
    ("{{ ['%9000000000d']|map('format', 1)|list }}", MADE),
    ("{{ [[1, 2]]|map('batch', 1000000000, 'x')|list }}", MADE),
    ("{{ l|select('filter')|map('indent', 1000000000)|list }}{{ 'a'|indent(1000000000) }}", MADE),
    // Operators, in loops and one after the other.
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a * 2 %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=l) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=l) %}{% for i in range(60) %}{% set ns.a = 2 * ns.a %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=(x,)) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    ("{% for i in range(90000) %}{{ ((x * 100000) ~ i)|length }}{% endfor %}", MADE),
    ("{{ (l * 100000000)|length }}", MADE),
    ("{{ ((x, x) * 50000000)|length }}", MADE),
    ("{{ (x * 6000000)|length }}{{ (x * 6000000)|length }}{{ (x * 6000000)|length }}", MADE),
    // Constants, which are computed while compiling.
    ("{{ 'a' * 100000000 }}", CONSTANTS),
    ("{{ [1] * 100000000 }}", CONSTANTS),
    ("{{ (1, 2) * 50000000 }}", CONSTANTS),
    ("{{ ('a' * (9999 * 9999) ~ 'b')|length }}", CONSTANTS),
    ("{{ ('a' * (10 ** 7))|length }}", CONSTANTS),
    ("{{ ('a' * ((2 ** 3) * 0 + 100000000))|length }}", CONSTANTS),
    ("{{ ('a' * 1000000)|length }}{{ ('a' * 1000000)|length }}{{ ('a' * 3000000)|length }}", CONSTANTS),
    // Filters and methods.
    ("{{ 'a'|batch(1000000000, 'x')|list }}", MADE),
    ("{{ 'a'|slice(1000000000, 'x')|list }}", MADE),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a|replace('0', ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a.replace('0', ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a|replace('', ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a]|join(ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = ns.a.join([ns.a, ns.a]) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = '%s%s'|format(ns.a, ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = '{0}{0}'.format(ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a]|sum(start='') %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=l) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a]|sum(start=[]) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=l) %}{% for i in range(60) %}{% set ns.a = ns.a|chain(ns.a) %}{% endfor %}{{ ns.a|length }}",
        "chain is unknown",
    ),
    ("{{ range(100000)|zip(range(100000))|list }}", "zip is unknown"),
    ("{{ debug() }}", "debug is unknown"),
    ("{% for i in range(90000) %}{{ (range(90000)|list)|length }}{% endfor %}", MADE),
    ("{% for i in range(90000) %}{{ (x * 10000).split('0')|length }}{% endfor %}", MADE),
    ("{% for i in range(90000) %}{{ (x * 10000)|list|length }}{% endfor %}", MADE),
    ("{% for i in range(90000) %}{{ [*range(90000)]|length }}{% endfor %}", MADE),
    ("{% for i in range(90000) %}{{ (range(90000)|list)[1:]|length }}{% endfor %}", MADE),
    // Values in one another, small themselves.
    (
        "{% set ns = namespace(a=l) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=l) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=m) %}{% for i in range(60) %}{% set ns.a = {'a': ns.a, 'b': ns.a} %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=m) %}{% for i in range(60) %}{% set ns.a = dict(a=ns.a, b=ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=[]) %}{% for i in range(90000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a|length }}",
        DEEP,
    ),
    (
        "{% set ns = namespace(a=[]) %}{% for i in range(90000) %}{% set ns.a = (ns.a,) %}{% endfor %}{{ ns.a|length }}",
        DEEP,
    ),
    (
        "{% set ns = namespace(a=m) %}{% for i in range(90000) %}{% set ns.a = {'a': ns.a} %}{% endfor %}{{ ns.a|length }}",
        DEEP,
    ),
    (
        "{% set ns = namespace(a=m) %}{% for i in range(90000) %}{% set ns.a = dict(a=ns.a) %}{% endfor %}{{ ns.a|length }}",
        DEEP,
    ),
    (
        "{% set ns = namespace(a=[1]) %}{% for i in range(90000) %}{% set ns.a = ns.a|batch(1) %}{% endfor %}{{ ns.a|length }}",
        DEEP,
    ),
    (
        "{% set ns = namespace(a=[1]) %}{% for i in range(90000) %}{% set ns.a = ns.a|map('list')|list %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a|length }}",
        "i",
    ),
    ("{% set ns = namespace(a=1) %}{% set ns.a = ns %}{{ ns }}", "within another value"),
    ("{% set ns = namespace(a=1) %}{% set ns.a = [ns] %}{{ ns }}", "within another value"),
    ("{% for i in [1] %}{{ loop.changed(loop) }}{% endfor %}", "within another value"),
    (
        "{% set h = namespace(a=1) %}{% for i in range(90000) %}{% set n = namespace() %}{% set n.a = h.a %}{% set h.a = n %}{% endfor %}",
        "within another value",
    ),
    (
        "{% set ns = namespace(a=[1]) %}{% for i in range(90000) %}{% set ns.a = ns.a[0:] %}{% endfor %}{% for i in range(900000) %}{% endfor %}",
        "too many",
    ),
    // Captures: raw text and values that are not written to the end.
    (
        "{% set a %}{{ x }}{% endset %}{% for i in range(60) %}{% endfor %}{% set b %}{% for i in range(9000) %}{{ x * 100000 }}{% endfor %}{% endset %}",
        MADE,
    ),
    (
        "{% set b %}{% for i in range(90000) %}{% for j in range(90000) %}................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................{% endfor %}{% endfor %}{% endset %}",
        "",
    ),
    (
        "{% macro f(a) %}{{ a }}{{ a }}{% endmacro %}{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set ns.a = f(ns.a) %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set b %}{% call f() %}{{ ns.a }}{% endcall %}{% endset %}{% set ns.a = b %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set b %}{% filter upper %}{{ ns.a }}{{ ns.a }}{% endfilter %}{% endset %}{% set ns.a = b %}{% endfor %}{{ ns.a|length }}",
        MADE,
    ),
    (
        "{% set ns = namespace(a='<&>'|list|join) %}{% autoescape true %}{% for i in range(60) %}{% set ns.a = ns.a|string|e|string ~ '' %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{% endautoescape %}",
        MADE,
    ),
    (
        "{% set ns = namespace(a=[1e308] * 5) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{{ (ns.a|string)|length }}{% endfor %}",
        MADE,
    ),
    (
        "{{ range(100000)|tojson(indent=1000000)|length }}{{ (range(100000)|list)|tojson(indent=1000000)|length }}{{ x * 9000000 }}",
        "",
    ),
    // Time: what looks at much and makes little.
    (
        "{% set a = range(90000)|list %}{% for i in range(90000) %}{% if a == range(90000)|list %}{% endif %}{% endfor %}",
        MADE,
    ),
    (
        "{% set a = range(90000)|list %}{% set b = range(90000)|list %}{% for i in range(90000) %}{% for j in range(9) %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
        MADE,
    ),
    ("{% for i in range(90000) %}{% if 'x' in range(90000) %}{% endif %}{% endfor %}", MADE),
    (
        "{% set a = x * 300000 %}{% for i in range(90000) %}{% for j in range(9) %}{% if 'nothing' in a %}{% endif %}{% endfor %}{% endfor %}",
        MADE,
    ),
    (
        "{% set a = x * 300000 %}{% for i in range(90000) %}{% for j in range(9) %}{% if a[-1:] %}{% endif %}{% endfor %}{% endfor %}",
        MADE,
    ),
    (
        "{% set a = x * 300000 %}{% for i in range(90000) %}{% for j in range(9) %}{{ a|length }}{% endfor %}{% endfor %}",
        "",
    ),
    ("{% set a = x * 100000 %}{{ a.strip(a)|length }}", MADE),
    ("{% set a = x * 100000 %}{{ a|trim(a)|length }}", MADE),
    ("{% set a = [range(90000)|list] * 9 %}{% for i in range(90000) %}{% if a|sort %}{% endif %}{% endfor %}", MADE),
    ("{% set a = range(90000)|list %}{% for i in range(90000) %}{{ loop.changed(a) }}{% endfor %}", MADE),
    ("{% set a = range(90000)|list %}{% for i in range(90000) %}{% set b = {a: 1} %}{% endfor %}", MADE),
    (
        "{% set a = range(90000)|list %}{% set b = {'a': 1} %}{% for i in range(90000) %}{% set c = b[a] %}{% set c = b.get(a) %}{% endfor %}",
        "",
    ),
    ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", FUEL),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
    ("{% include 'chat_template' %}", "cannot import"),
    ("{% extends 'template' %}", "cannot import"),
    ("{% from 'template' import x %}", "cannot import"),
    ("{% for i in [1] %}{{ loop.changed(*[1]) }}{% endfor %}", "no *arguments"),
];

/// Sources that are deeper than a stack.
fn deep() -> Vec<(String, &'static str)> {
    let many = |before: &str, part: &str, times: usize, after: &str| format!("{before}{}{after}", part.repeat(times));
    vec![
        (many("{{ 1", "+1", 100_000, " }}"), "levels deep"),
        (many("{{ x", "+1", 100_000, " }}"), "levels deep"),
        (many("{{ x", "|d", 100_000, " }}"), "levels deep"),
        (many("{{ x", ".a", 100_000, " }}"), "levels deep"),
        (many("{{ x", "[0]", 80_000, " }}"), "levels deep"),
        (many("{{ x", "()", 100_000, " }}"), "levels deep"),
        (many("{{ ", "not ", 60_000, "x }}"), ""),
        (many("{{ ", "-", 100_000, "x }}"), ""),
        (many("{{ ", "(", 100_000, "x }}"), ""),
        (many("{{ ", "[", 100_000, "x }}"), ""),
        (many("{% if x %}", "{%elif x%}", 25_000, "{% endif %}"), ""),
        (many("{{ x ", "if x else x ", 20_000, " }}"), ""),
        (many("{{ x ", "or x ", 50_000, " }}"), "levels deep"),
        (many("{{ x ", "is y ", 50_000, " }}"), "levels deep"),
        (many("", "{% if x %}", 25_000, ""), ""),
        (many("", "x", 300_000, ""), "KiB"),
    ]
}

/// Each must fail soon with its words. `render` is of one kind of templates.
pub fn every_bomb_is_defused(render: impl Fn(&str) -> Result<String, String>) {
    let mut sources: Vec<_> = BOMBS.iter().map(|(source, words)| (format!("{VALUES}{source}"), *words)).collect();
    sources.extend(deep());
    for (source, words) in sources {
        let begun = Instant::now();
        let error = render(&source).map(|text| text.len());
        let took = begun.elapsed();
        let short: String =
            source.chars().skip(if source.starts_with(VALUES) { VALUES.len() } else { 0 }).take(150).collect();
        let error = error.expect_err(&short);
        assert!(error.contains(words), "{short}: {error}");
        assert!(took < Duration::from_secs(20), "{short}: {took:?}");
        if std::env::var_os("BOMBS").is_some() {
            println!("{took:?} {} {error} {short}", super::tests::peak());
        }
    }
}
pub fn peak() -> String {
    std::fs::read_to_string("/proc/self/status").unwrap().lines().find(|l| l.starts_with("VmHWM")).unwrap().to_owned()
}
