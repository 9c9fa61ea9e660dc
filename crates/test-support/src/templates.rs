//! Templates that would use up all memory, stack or time, for the tests of chat and reward templates.

use std::time::{Duration, Instant};

const TOO_MUCH_TEXT: &str = "the template creates more than ";
const CONSTANTS: &str = "MiB of constants";
const NESTED_OBJECT: &str = "in another value";
const IMPORT: &str = "a template cannot import";
const LEVELS: &str = "levels deep";
const RECURSION: &str = "recursion limit";

/// Time limit for each template. Rendering takes at most a second, except in an unoptimized build on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Template variables: `x` is a text of 16 bytes, `l` a list with `x`, `m` a map with both, defined such that the compiler cannot
/// fold them to constants.
const VALUES: &str = "{% set x = '0123456789abcdef'|upper %}{% set l = [x] %}{% set m = {'k': x, 'l': l} %}";

/// Templates that must fail, each with a part of its error message.
const BOMBS: &[(&str, &str)] = &[
    // Templates with format strings and paddings of huge widths.
    ("{{ '%9000000000d'|format(1) }}", TOO_MUCH_TEXT),
    ("{{ '%*d'|format(9000000000, 1) }}", TOO_MUCH_TEXT),
    ("{{ '%.*f'|format(9000000000, 1.5) }}", TOO_MUCH_TEXT),
    ("{{ '%(k)9000000000s'|format(k=1) }}", TOO_MUCH_TEXT),
    ("{{ '%9000000000s'|safe|format(1) }}", TOO_MUCH_TEXT),
    ("{{ '{:9000000000}'.format(1) }}", TOO_MUCH_TEXT),
    ("{{ '{0:x>9000000000}'.format(1) }}", TOO_MUCH_TEXT),
    ("{{ ('{0}' * 100000).format(x * 100000) }}", TOO_MUCH_TEXT),
    ("{{ 'a'|indent(1000000000) }}", TOO_MUCH_TEXT),
    ("{{ 'a'|indent(width=1000000000) }}", TOO_MUCH_TEXT),
    ("{{ ('a\n' * 100000)|indent(100000) }}", TOO_MUCH_TEXT),
    ("{{ (range(100000)|list)|tojson(indent=1000000)|length }}{{ x * 30000000 }}", TOO_MUCH_TEXT),
    ("{{ 'a'.center(1000000000) }}", TOO_MUCH_TEXT),
    ("{{ 'a'.ljust(1000000000) }}", TOO_MUCH_TEXT),
    ("{{ 'a'.rjust(1000000000) }}", TOO_MUCH_TEXT),
    ("{{ 'a'.zfill(1000000000) }}", TOO_MUCH_TEXT),
    ("{{ 'a'.expandtabs(1000000000) }}", "no method"),
    ("{{ 'a'|wordwrap(1000000000) }}", "wordwrap is unknown"),
    ("{{ ['a']|map('center', 1000000000)|list }}", "unknown filter"),
    ("{{ ['a']|map('indent', 1000000000)|list }}", TOO_MUCH_TEXT),
    ("{{ ['%9000000000d']|map('format', 1)|list }}", TOO_MUCH_TEXT),
    ("{{ [[1, 2]]|map('batch', 1000000000, 'x')|list }}", TOO_MUCH_TEXT),
    ("{% macro f(g) %}{{ g.format(1) }}{% endmacro %}{{ f('{:9000000000}') }}", TOO_MUCH_TEXT),
    // Templates that repeat texts and lists, also in constants that the compiler computes.
    ("{{ (x * 100000000)|length }}", TOO_MUCH_TEXT),
    ("{{ (100000000 * x)|length }}", TOO_MUCH_TEXT),
    ("{{ (l * 100000000)|length }}", TOO_MUCH_TEXT),
    ("{{ ((x, x) * 50000000)|length }}", TOO_MUCH_TEXT),
    ("{{ (x * 6000000)|length }}{{ (x * 6000000)|length }}{{ (x * 6000000)|length }}", TOO_MUCH_TEXT),
    ("{{ 'a' * 100000000 }}", CONSTANTS),
    ("{{ [1] * 100000000 }}", CONSTANTS),
    ("{{ (1, 2) * 50000000 }}", CONSTANTS),
    ("{{ ('a' * (9999 * 9999) ~ 'b')|length }}", CONSTANTS),
    ("{{ ('a' * (10 ** 7))|length }}", CONSTANTS),
    ("{{ ('a' * ((2 ** 3) * 0 + 100000000))|length }}", CONSTANTS),
    ("{{ ('a' * 1000000)|length }}{{ ('a' * 1000000)|length }}{{ ('a' * 3000000)|length }}", CONSTANTS),
    ("{% set a = 'a' * 3000000 %}{% if 'a' * 3000000 == a %}{% endif %}", CONSTANTS),
    // Templates that create lists filled up to a huge length.
    ("{{ 'a'|batch(1000000000, 'x')|list }}", TOO_MUCH_TEXT),
    ("{{ 'a'|slice(1000000000, 'x')|list }}", TOO_MUCH_TEXT),
    ("{{ l|chain(l)|length }}", "chain is unknown"),
    ("{{ range(100000)|zip(range(100000))|list }}", "zip is unknown"),
    ("{{ m|pprint }}", "pprint is unknown"),
    ("{{ debug() }}", "debug is unknown"),
    // Templates with values that contain themselves: rendering would never end, and memory would never be freed.
    ("{% set ns = namespace(a=1) %}{% set ns.a = ns %}{{ ns }}", NESTED_OBJECT),
    ("{% set ns = namespace(a=1) %}{% set ns.a = [ns] %}{{ ns }}", NESTED_OBJECT),
    ("{% set ns = namespace(a=1) %}{% set ns.a = dict(a=ns) %}{{ ns }}", NESTED_OBJECT),
    ("{% set ns = namespace(a=1) %}{% set ns.a = {'a': ns} %}{{ ns }}", NESTED_OBJECT),
    ("{% for i in [1] %}{{ loop.changed(loop) }}{% endfor %}", NESTED_OBJECT),
    ("{% for i in [1] %}{{ loop.changed(*[1]) }}{% endfor %}", "not accept *arguments"),
    // Templates that run long or read much in other ways.
    ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "fuel"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RECURSION),
    ("{% include 'chat_template' %}", IMPORT),
    ("{% extends 'template' %}", IMPORT),
    ("{% import 'template' as x %}", IMPORT),
    ("{% from 'template' import x %}", IMPORT),
    ("{% set a = x * 100000 %}{{ a.strip(a)|length }}", TOO_MUCH_TEXT),
    ("{% set a = x * 100000 %}{{ a|trim(a)|length }}", TOO_MUCH_TEXT),
];

/// A start value, and an expression that doubles it, to be applied repeatedly.
const GROWING: &[(&str, &str)] = &[
    ("x", "ns.a ~ ns.a"),
    ("x", "ns.a + ns.a"),
    ("x", "ns.a * 2"),
    ("l", "ns.a + ns.a"),
    ("l", "2 * ns.a"),
    ("(x,)", "ns.a + ns.a"),
    ("x", "ns.a|replace('0', ns.a)"),
    ("x", "ns.a|replace('', ns.a)"),
    ("x", "ns.a.replace('0', ns.a)"),
    ("x", "[ns.a, ns.a]|join(ns.a)"),
    ("x", "ns.a.join([ns.a, ns.a])"),
    ("x", "(ns.a ~ ns.a)|list|join"),
    ("x", "(ns.a ~ ' ' ~ ns.a).split()|join"),
    ("x", "'%s%s'|format(ns.a, ns.a)"),
    ("x", "'{0}{0}'.format(ns.a)"),
    ("x", "[ns.a, ns.a]|sum(start='')"),
    ("l", "[ns.a, ns.a]|sum(start=[])"),
    ("x", "[ns.a, ns.a]|string"),
    ("x", "[ns.a, ns.a] ~ ''"),
    ("'<'|lower", "(ns.a ~ ns.a)|e"),
    ("x", "twice(ns.a)"),
];

/// Expressions whose values use little memory, but are large when all nested values are visited.
const DOUBLING: &[(&str, &str)] = &[
    ("l", "[ns.a, ns.a]"),
    ("l", "(ns.a, ns.a)"),
    ("m", "{'a': ns.a, 'b': ns.a}"),
    ("m", "dict(a=ns.a, b=ns.a)"),
    ("m", "[{'a': ns.a}]|groupby('a')"),
];

/// A start value, and an expression that nests the value in itself, to be applied repeatedly: dropping the result
/// would overflow the stack.
const NESTING: &[(&str, &str)] = &[
    ("l", "[ns.a]"),
    ("l", "(ns.a,)"),
    ("m", "{'a': ns.a}"),
    ("m", "dict(a=ns.a)"),
    ("l", "ns.a|batch(1)"),
    ("l", "ns.a|slice(1)"),
    ("[l]", "[ns.a]|map('list')|list"),
    ("m", "{'a': ns.a}|items|list"),
    ("m", "{'a': ns.a}.values()|list"),
    ("m", "{'a': ns.a}|dictsort"),
    ("m", "namespace(a=ns.a)"),
];

/// Definitions, and an expression that allocates or reads much, to be repeated in a loop.
const REPEATED: &[(&str, &str)] = &[
    ("", "{{ ((x * 100000) ~ i)|length }}"),
    ("", "{{ (range(90000)|list)|length }}"),
    ("", "{{ [x * 100000]|tojson|length }}"),
    ("", "{{ (x * 10000).split('0')|length }}"),
    ("", "{{ (x * 10000)|list|length }}"),
    ("", "{{ '{0}'.format(*range(90000)) }}"),
    ("{% set a = range(90000)|list %}", "{{ a[1:]|length }}"),
    ("{% set a = range(90000)|list %}", "{{ a[::-1]|length }}"),
    ("{% set a = range(90000)|list %}", "{{ (a|reverse)|length }}"),
    ("{% set a = range(90000)|list %}", "{% set b = ns.a + a %}"),
    ("{% set a = range(90000)|list %}", "{% if a == range(90000)|list %}{% endif %}"),
    ("{% set a = range(90000)|list %}{% set b = range(90000)|list %}", "{% if a == b %}{% endif %}"),
    ("{% set a = range(90000)|list %}{% set b = range(90000)|list %}", "{% if a is eq b %}{% endif %}"),
    ("{% set a = range(90000)|list %}{% set b = range(90000)|list %}", "{% if 0 < 1 < 2 and a <= b <= a %}{% endif %}"),
    ("{% set a = range(90000)|list %}", "{% set b = {a: 1} %}"),
    ("{% set a = range(90000)|list %}{% set b = {'a': 1} %}", "{% set c = b[a] %}"),
    ("{% set a = range(90000)|list %}{% set b = {'a': 1} %}", "{% set c = b.get(a) %}"),
    ("{% set a = range(90000)|list %}", "{% set c = a|max %}"),
    ("{% set a = range(90000)|list %}", "{% set c = a|sum %}"),
    ("{% set a = [range(90000)|list] * 2 %}", "{% set c = a|sort %}"),
    ("", "{% if 'x' in range(90000) %}{% endif %}"),
    ("{% set a = x * 300000 %}", "{% if 'nothing' in a %}{% endif %}"),
    ("{% set a = x * 300000 %}", "{% if a.find('nothing') %}{% endif %}"),
    ("{% set a = x * 300000 %}", "{% if a[-1:] %}{% endif %}"),
    ("{% set a = x * 300000 %}", "{% if a[-1] %}{% endif %}"),
    ("{% set a = x * 300000 %}", "{% if a|length %}{% endif %}"),
];

/// Template sources that are nested deeper than a stack allows: a prefix, a part and how often it is repeated, a suffix, and a part
/// of the error message.
const DEEP: &[(&str, &str, usize, &str, &str)] = &[
    ("{{ 1", "+1", 100_000, " }}", LEVELS),
    ("{{ x", "+1", 100_000, " }}", LEVELS),
    ("{{ x", "|d", 100_000, " }}", LEVELS),
    ("{{ x", ".a", 100_000, " }}", LEVELS),
    ("{{ x", "[0]", 80_000, " }}", LEVELS),
    ("{{ x", "()", 100_000, " }}", LEVELS),
    ("{{ x ", "or x ", 50_000, " }}", LEVELS),
    ("{{ x ", "is y ", 50_000, " }}", LEVELS),
    ("{{ x ", "if x else x ", 20_000, " }}", LEVELS),
    ("{{ ", "not ", 60_000, "x }}", LEVELS),
    ("{{ ", "-", 100_000, "x }}", LEVELS),
    ("{% if x %}", "{%elif x%}", 25_000, "{% endif %}", LEVELS),
    ("{{ ", "(", 100_000, "x }}", RECURSION),
    ("{{ ", "[", 100_000, "x }}", RECURSION),
    ("", "{% if x %}", 25_000, "", RECURSION),
    ("", "x", 300_000, "", "KiB"),
];

/// Templates that collect text in a variable, macro or filter, so that a limit on the output would not stop them.
const CAPTURES: &[&str] = &[
    "{% set a %}{% for i in range(9000) %}{{ x * 100000 }}{% endfor %}{% endset %}",
    "{% set a %}{% for i in range(90000) %}{% for j in range(9) %}RAW{% endfor %}{% endfor %}{% endset %}",
    "{% macro f() %}{% for i in range(90000) %}{% for j in range(9) %}RAW{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{% for i in range(90000) %}RAW{% endfor %}{% endcall %}",
    "{% filter upper %}{% for i in range(90000) %}{% for j in range(9) %}RAW{% endfor %}{% endfor %}{% endfilter %}",
    "{% set ns = namespace(a=x) %}{% for i in range(60) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}\
     {% set ns.a = b %}{% endfor %}",
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns = namespace(a=x) %}{% for i in range(60) %}\
     {% set b %}{% call f() %}{{ ns.a }}{% endcall %}{% endset %}{% set ns.a = b %}{% endfor %}",
    "{% block a %}{% for i in range(90000) %}{% for j in range(9) %}RAW{% endfor %}{% endfor %}{% endblock %}",
    "{% for i in [[[]]] recursive %}{% set a %}{% for j in range(90000) %}RAW{% endfor %}{% endset %}{% endfor %}",
];

/// Checks that each template fails soon with its error message. `render` renders one kind of template; `slow` are
/// templates that read for long.
pub fn every_costly_template_fails_soon(render: impl Fn(&str) -> Result<String, String>, slow: bool) {
    let twice = "{% macro twice(a) %}{{ a }}{{ a }}{% endmacro %}";
    let steps = |start: &str, step: &str, times: usize| {
        let step = format!("{{% for i in range({times}) %}}{{% set ns.a = {step} %}}{{% endfor %}}");
        format!("{VALUES}{twice}{{% set ns = namespace(a={start}) %}}{step}{{{{ ns.a|length }}}}")
    };
    let mut sources: Vec<(String, &str)> = Vec::new();
    sources.extend(BOMBS.iter().map(|(source, words)| (format!("{VALUES}{source}"), *words)));
    sources.extend(GROWING.iter().map(|(start, step)| (steps(start, step, 60), TOO_MUCH_TEXT)));
    sources.extend(NESTING.iter().map(|(start, step)| (steps(start, step, 90_000), "")));
    let raw = "0123456789".repeat(300);
    sources.extend(CAPTURES.iter().map(|source| (format!("{VALUES}{source}").replace("RAW", &raw), TOO_MUCH_TEXT)));
    sources.extend(
        DEEP.iter()
            .map(|(before, part, times, after, words)| (format!("{before}{}{after}", part.repeat(*times)), *words)),
    );
    if slow {
        let again =
            |part| format!("{{% for i in range(90000) %}}{{% for j in range(9) %}}{part}{{% endfor %}}{{% endfor %}}");
        sources.extend(DOUBLING.iter().map(|(start, step)| (steps(start, step, 60), TOO_MUCH_TEXT)));
        sources.extend(REPEATED.iter().map(|(before, part)| {
            (format!("{VALUES}{{% set ns = namespace(a=l) %}}{before}{}", again(part)), TOO_MUCH_TEXT)
        }));
    }
    let mut failures = Vec::new();
    for (source, words) in sources {
        let begun = Instant::now();
        let result = render(&source).map(|text| text.len());
        let took = begun.elapsed();
        let short: String = source.trim_start_matches(VALUES).trim_start_matches(twice).chars().take(150).collect();
        if !result.as_ref().is_err_and(|error| error.contains(words)) || took > TIME_LIMIT {
            failures.push(format!("{short}: {result:?} after {took:?}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
