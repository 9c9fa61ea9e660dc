use std::time::{Duration, Instant};

use super::*;

/// More time than anything in these tests takes on a loaded machine. The rejected work would take years.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Definitions `a0` … `an`, each of which applies the previous one twice.
fn doubling(count: usize, twice: impl Fn(Value) -> Value) -> Value {
    let definitions =
        (1..=count).map(|number| (format!("a{number}"), twice(json!({"$ref": format!("#/$defs/a{}", number - 1)}))));
    let definitions: serde_json::Map<String, Value> =
        definitions.chain([("a0".to_owned(), json!({"maximum": 9}))]).collect();
    json!({"$defs": definitions, "$ref": format!("#/$defs/a{count}")})
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(json!(1), |inner, _| json!([inner]))
}

#[test]
fn a_schema_whose_references_double_again_and_again_is_refused_at_once() {
    let begun = Instant::now();
    for twice in [
        |below: Value| json!({"allOf": [below, below]}),
        |below: Value| json!({"anyOf": [below, below]}),
        |below: Value| json!({"oneOf": [below, below]}),
        |below: Value| json!({"not": below, "if": below}),
        |below: Value| json!({"allOf": [below], "$dynamicRef": below["$ref"]}),
        |below: Value| json!({"dependentSchemas": {"a": below, "b": below}}),
        |below: Value| json!({"properties": {"a": below, "b": below}}),
        |below: Value| json!({"prefixItems": [below, below], "contains": below}),
        |below: Value| json!({"allOf": [{"not": below}, {"not": {"allOf": [below]}}]}),
    ] {
        for count in [45, 400] {
            let error = JsonSchema::new(&doubling(count, twice)).unwrap_err();
            assert!(error.contains("too much work"), "{error}");
        }
    }
    let chain = doubling(20, |below| json!({"allOf": [below, below]}));
    assert!(JsonSchema::new(&chain).unwrap_err().contains("/$defs/a"));
    assert!(begun.elapsed() < TIME_LIMIT, "{:?}", begun.elapsed());
}

#[test]
fn a_schema_that_doubles_a_few_times_still_works() {
    let schema = JsonSchema::new(&doubling(10, |below| json!({"allOf": [below, below]}))).unwrap();
    assert_eq!((schema.accepts(&json!(9)), schema.accepts(&json!(10))), (Ok(true), Ok(false)));
}

#[test]
fn a_recursive_schema_that_doubles_is_given_up_on_a_deep_value_and_works_on_a_shallow_one() {
    let item = json!({"$ref": "#"});
    for schema in [
        json!({"allOf": [{"items": item}, {"items": item}]}),
        json!({"items": {"anyOf": [item, {"allOf": [item]}]}}),
        json!({"items": item, "contains": item}),
        json!({"$dynamicAnchor": "n", "items": {"allOf": [{"$dynamicRef": "#n"}, {"$dynamicRef": "#n"}]}}),
        json!({"$schema": "http://json-schema.org/draft-07/schema#", "items": {"allOf": [item, item]}}),
        json!({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": true,
               "items": {"allOf": [{"$recursiveRef": "#"}, {"$recursiveRef": "#"}]}}),
        json!({"$id": "http://x.example/a", "items": {"allOf": [{"$ref": "a"}, {"$ref": "http://x.example/a#"}]}}),
        json!({"$defs": {"x": {"$anchor": "x", "items": {"not": {"anyOf": [{"$ref": "#x"}, {"$ref": "#x"}]}}}}, "$ref": "#x"}),
        json!({"unknown": {"x/y": {"items": {"allOf": [{"$ref": "#/unknown/x~1y"}, {"$ref": "#/unknown/x%7E1y"}]}}},
               "$ref": "#/unknown/x~1y"}),
    ] {
        let begun = Instant::now();
        let compiled = JsonSchema::new(&schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert!(compiled.accepts(&nested(5)).is_ok(), "{schema}");
        assert_eq!(compiled.accepts(&nested(100)), Err(TooCostly::Steps), "{schema}");
        assert!(begun.elapsed() < TIME_LIMIT, "{schema}: {:?}", begun.elapsed());
    }
}

#[test]
fn allowed_work_ends_within_the_time_limit() {
    // Values of the maximum size, one of each kind.
    let wide: Vec<Value> = (0..9_000).map(|number| json!({"a": number, "b": [number.to_string()]})).collect();
    let item = json!({"$ref": "#"});
    for (schema, value) in [
        (doubling(13, |below| json!({"allOf": [below, below]})), json!(1)),
        (json!({"allOf": [{"items": item}, {"items": item}]}), nested(16)),
        (
            json!({"items": {"type": "object", "properties": {"a": {"minimum": 0}, "b": {"uniqueItems": true}},
                "unevaluatedProperties": false}}),
            json!(wide),
        ),
        (json!({"uniqueItems": true}), json!(wide)),
        (json!({"enum": (0..100_000).collect::<Vec<u32>>()}), json!(-1)),
        (json!({"pattern": "^(a|b|ab)*c$"}), json!("ab".repeat(100_000))),
        (
            json!({"items": {"not": {"items": {"not": {"pattern": "(a*)*b"}}}}}),
            json!(vec![vec!["a".repeat(100); 100]; 50]),
        ),
    ] {
        let begun = Instant::now();
        let verdict = JsonSchema::new(&schema).unwrap().accepts(&value);
        assert!(verdict.is_ok(), "{verdict:?} {}", schema.to_string().chars().take(200).collect::<String>());
        println!("{:?}", begun.elapsed());
        assert!(begun.elapsed() < TIME_LIMIT, "{:?}", begun.elapsed());
    }
}

#[test]
fn deep_schemas_and_long_chains_do_not_end_the_process() {
    let deep = (0..120).fold(json!({"maximum": 9}), |inner, _| json!({"not": inner}));
    assert_eq!(JsonSchema::new(&deep).unwrap().accepts(&json!(5)), Ok(true));
    let chain = |count| doubling(count, |below| json!({"allOf": [below]}));
    assert_eq!(JsonSchema::new(&chain(200)).unwrap().accepts(&json!(10)), Ok(false));
    assert!(JsonSchema::new(&chain(2000)).unwrap_err().contains("nested too deeply"));
    assert!(JsonSchema::new(&chain(20_000)).unwrap_err().contains("too large"));
    let through = (1..=40).fold(json!({"items": {"$ref": "#"}}), |inner, _| json!({"allOf": [inner]}));
    let through = JsonSchema::new(&through).unwrap();
    assert_eq!(through.accepts(&nested(10)), Ok(true));
    assert_eq!(through.accepts(&nested(120)), Err(TooCostly::Depth));
}

#[test]
fn circles_on_one_value_are_refused() {
    for schema in [
        json!({"$ref": "#"}),
        json!({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
    ] {
        assert!(JsonSchema::new(&schema).unwrap_err().contains("circle"), "{schema}");
    }
    // The target depends on the path that leads to the reference.
    let below = json!({"$id": "b", "$dynamicAnchor": "n", "anyOf": [{"type": "string"}, {"$dynamicRef": "#n"}]});
    let meets_itself = json!({"$id": "http://x.example/a", "$dynamicAnchor": "n", "$ref": "b", "$defs": {"b": below}});
    assert_eq!(JsonSchema::new(&meets_itself).unwrap().accepts(&json!(1)), Err(TooCostly::Circle));
}

#[test]
fn patterns_that_compile_to_much_are_refused() {
    assert!(JsonSchema::new(&json!({"pattern": "a{1,100000}"})).unwrap_err().contains("pattern"));
    let many: serde_json::Map<String, Value> =
        (0..200).map(|number| (format!("x{{1,2000}}{number}"), json!(true))).collect();
    assert!(JsonSchema::new(&json!({"patternProperties": many})).unwrap_err().contains("patterns"));
}

#[test]
fn usual_schemas_give_the_same_results_as_the_validator() {
    let tree = json!({"$id": "https://x.example/tree", "$dynamicAnchor": "node", "type": "object", "properties":
        {"data": true, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}}});
    let cases = [
        (json!({"$ref": "https://json-schema.org/draft/2020-12/schema"}), json!({"type": "object"}), true),
        (json!({"$ref": "https://json-schema.org/draft/2020-12/schema"}), json!({"type": "nothing"}), false),
        (
            json!({"$ref": "http://json-schema.org/draft-07/schema#"}),
            json!({"properties": {"a": {"minimum": "1"}}}),
            false,
        ),
        (tree.clone(), json!({"children": [{"data": 1, "children": []}]}), true),
        (tree.clone(), json!({"children": [{"children": 1}]}), false),
        (
            json!({"$id": "https://x.example/strict", "$dynamicAnchor": "node", "$ref": "tree", "unevaluatedProperties": false,
                "$defs": {"tree": tree}}),
            json!({"children": [{"daat": 1}]}),
            false,
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"type": "integer"}},
                "$ref": "#/definitions/n", "type": "string"}),
            json!(1),
            true,
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"$id": "#n", "type": "integer"}},
                "items": [{"$ref": "#n"}], "additionalItems": {"type": "string"}}),
            json!([1, "a", 2]),
            false,
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x.example/r", "definitions":
                {"n": {"id": "n", "type": "integer"}}, "additionalProperties": {"$ref": "n"}}),
            json!({"a": 1}),
            true,
        ),
        (json!({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), json!(3), false),
        (json!({"propertyNames": {"pattern": "^[a-z]+$"}}), json!({"A": 1}), false),
        (json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": false}), json!({"a": 1, "b": 2}), true),
        (json!(true), json!(1), true),
        (json!(false), json!(1), false),
        (json!({}), json!(null), true),
    ];
    for (schema, value, expected) in cases {
        let compiled = JsonSchema::new(&schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert_eq!(compiled.accepts(&value), Ok(expected), "{schema} {value}");
        // Compares with the validator when it describes every error.
        let mut compiler = Compiler::new();
        let mut schemas = Schemas::new();
        compiler.add_resource(SCHEMA_ADDRESS, schema.clone()).unwrap();
        let index = compiler.compile(SCHEMA_ADDRESS, &mut schemas).unwrap();
        assert_eq!(schemas.validate(&value, index).is_ok(), expected, "{schema} {value}");
    }
}
