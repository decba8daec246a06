//! Tests of refused changes in `vm.pressure`, and of the decisions that it returns.

use super::*;

#[test]
fn invalid_pressure_changes_never_reach_the_owner() {
    run(async |mut fixture| {
        for (body, text) in [
            ("", "it is empty"),
            ("null", "not a JSON object"),
            ("[]", "not a JSON object"),
            (r#""pause""#, "not a JSON object"),
            ("{", "EOF"),
            (r#"{"pause": true"#, "EOF"),
            (
                r#"{"polcy": "psi"}"#,
                r#""polcy" (did you mean 'policy'?); the keys are policy, size, "#,
            ),
            (r#"{"policy": "psi", "policy": "off"}"#, "policy is given twice"),
            (r#"{"policy": 7}"#, "policy is 7, and must be a string"),
            (r#"{"policy": ["psi"]}"#, "policy is a list, and must be a string"),
            (r#"{"policy": ""}"#, "psi, amf, dapper, pmb, memorage, fixed, off"),
            (r#"{"policy": "magic"}"#, "psi, amf, dapper, pmb, memorage, fixed, off"),
            (r#"{"policy": "PSI"}"#, "psi, amf, dapper, pmb, memorage, fixed, off"),
            (r#"{"policy": "fixed"}"#, "size= is missing: policy=fixed needs it"),
            (
                r#"{"policy": "psi", "size": 2097152}"#,
                "is not a parameter of policy psi, only of fixed",
            ),
            (r#"{"policy": "fixed", "size": 0, "params": {"size": 0}}"#, "size is given twice"),
            (r#"{"size": 0, "params": {"size": "2M"}}"#, "size is given twice"),
            (r#"{"policy": "fixed", "size": -1}"#, "size is -1, and must be a whole number from 0"),
            (
                r#"{"policy": "fixed", "size": 2097152.5}"#,
                "size is 2097152.5, and must be a whole number",
            ),
            (r#"{"policy": "fixed", "size": "2M"}"#, r#"size is "2M", and must be a whole number"#),
            (r#"{"policy": "fixed", "size": 1e300}"#, ", and must be a whole number from 0"),
            (
                r#"{"policy": "fixed", "size": 18446744073709551616}"#,
                ", and must be a whole number from 0",
            ),
            (r#"{"policy": "fixed", "size": 1}"#, "a multiple of 2M"),
            (r#"{"policy": "fixed", "size": 70368746274816}"#, "must be 0 to 64T"),
            (
                r#"{"params": {"idle": -1}}"#,
                "params.idle is -1, and must be a whole number, or a text",
            ),
            (
                r#"{"params": {"idle": 1.5}}"#,
                "params.idle is 1.5, and must be a whole number, or a text",
            ),
            (
                r#"{"rules": {"cool_down": ["2s"]}}"#,
                "rules.cool_down is a list, and must be a whole number, or",
            ),
            (r#"{"rules": ["cool_down"]}"#, "rules is a list, and must be an object"),
            (r#"{"policy": "fixed", "params": {}}"#, "size= is missing: policy=fixed needs it"),
            (r#"{"dry_run": "on"}"#, r#"dry_run is "on", and must be true or false"#),
            (r#"{"dry_run": 1}"#, "dry_run is 1, and must be true or false"),
            (r#"{"pause": "yes"}"#, "must be true or false"),
            (r#"{"resume": "pm"}"#, "must be true or false"),
            (r#"{"resume": true, "zone": 1}"#, "zone is 1, and must be a string"),
            (r#"{"zone": "pm"}"#, "without \"resume\": true"),
            (r#"{"resume": false, "zone": "pm"}"#, "without \"resume\": true"),
            (r#"{"pause": true, "resume": true}"#, "ends a pause"),
        ] {
            let (status, answer) = fixture.call("PUT", "vm.pressure", body).await;
            assert_eq!(status, 400, "{body}: {answer}");
            assert!(messages(&answer)[0].contains(text), "{body}: {answer}");
        }
        for query in [
            "decisions=",
            "decisions=-1",
            "decisions=1001",
            "decisions=1.5",
            "decisions=+1",
            "log=5",
            "decisions",
            "decisions=1&decisions=2",
            "decisions=99999999999999999999",
        ] {
            let (status, answer) = fixture.call("GET", &format!("vm.pressure?{query}"), "").await;
            assert_eq!(status, 400, "{query}: {answer}");
            assert!(messages(&answer)[0].starts_with("vm.pressure: "), "{query}: {answer}");
        }
        assert!(fixture.asked.try_recv().is_err(), "a request has reached the VM task");
    });
}

#[test]
fn number_of_decisions_is_selectable() {
    run(async |mut fixture| {
        for (query, count) in [("", 50), ("?decisions=0", 0), ("?decisions=1000", 1000)] {
            assert_eq!(fixture.call("GET", &format!("vm.pressure{query}"), "").await.0, 200);
            let asked = fixture.asked.recv().await.unwrap();
            assert!(asked.starts_with(&format!("Pressure({count}, ")), "{asked}");
        }
    });
}
