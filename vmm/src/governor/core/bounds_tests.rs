//! Sizes that all zones together cannot have, and the two names of the size of `fixed`.

use serde_json::json;

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::fake::{BLOCK, MIB, fixture};
use crate::governor::info::PressureChange;
use balloon::controller::Rules;

fn change(json: serde_json::Value) -> PressureChange {
    serde_json::from_value(json).unwrap()
}

#[test]
fn what_is_to_be_there_in_any_case_is_no_more_than_the_zones_can_have() {
    let mut f = fixture("psi", false, true);
    let most = json!({"rules": {"floor": 1152 * MIB}});
    f.core.change(&change(most), TimeMs(0)).unwrap();
    for (wrong, message) in [
        (
            json!({"dry_run": true, "rules": {"floor": 1152 * MIB + BLOCK, "cool_down": "2s"}}),
            "floor is 1154M, must be at most 1152M, which is what all zones can have",
        ),
        (
            json!({"pause": true, "policy": "fixed", "size": 2048 * MIB}),
            "size is 2G, must be at most 1152M, which is what all zones can have",
        ),
        // Within what a parameter of its kind can be, and against another one.
        (
            json!({"rules": {"ceiling": "1G"}}),
            "ceiling is 1G, must be at least floor, which is 1152M",
        ),
        (
            json!({"params": {"idle": "31s"}}),
            "max_idle is 30s, must be at least idle, which is 31s",
        ),
    ] {
        assert_eq!(f.core.change(&change(wrong), TimeMs(0)).unwrap_err().to_string(), message);
        let info = f.core.info(0, TimeMs(0));
        assert_eq!((info.policy.as_str(), info.dry_run, info.paused), ("psi", false, false));
        let rules = &info.details["rules"];
        assert_eq!((&rules["floor"], &rules["cool_down"]), (&json!(1152 * MIB), &json!(5_000)));
    }
}

#[test]
fn a_machine_is_not_built_with_a_floor_that_it_cannot_have() {
    let build = |text| {
        let config = PressureConfig::parse(text).unwrap();
        config.validate().unwrap();
        let core = Core::new(&config, Vec::new(), 384 * MIB, std::sync::Arc::new(|| 0), TimeMs(0));
        core.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(build("floor=0"), Ok(()));
    let message =
        |name| Err(format!("{name} is 64M, must be at most 0, which is what all zones can have"));
    assert_eq!(build("floor=64M"), message("floor"));
    assert_eq!(build("policy=fixed,size=64M"), message("size"));
}

#[test]
fn a_name_that_is_unknown_is_told_with_those_of_the_policy_in_force_and_of_the_rules() {
    let mut f = fixture("psi", false, true);
    f.core.change(&change(json!({"policy": "amf"})), TimeMs(0)).unwrap();
    let names = Rules::TABLE.iter().map(|param| param.name).collect::<Vec<_>>().join(", ");
    let expected = |name| {
        format!(
            "parameter {name:?} is unknown; those of amf are watermark-scale, watermark-share, reclaim; those of the rules are {names}"
        )
    };
    // Misspelt, another policy's, and a rule in the wrong place.
    for name in ["cooldown", "idle", "ceiling"] {
        let refused = f
            .core
            .change(&change(json!({"params": {name: "1G"}})), TimeMs(0))
            .unwrap_err()
            .to_string();
        assert_eq!(refused, expected(name));
        let refused = f
            .core
            .change(&change(json!({"policy": "amf", "params": {name: "1G"}})), TimeMs(0))
            .unwrap_err();
        assert_eq!(refused.to_string(), format!("vm.pressure: {}", expected(name)));
    }
}

#[test]
fn the_size_of_fixed_may_be_set_alone_while_that_is_the_policy() {
    let mut f = fixture("psi", false, true);
    let refused =
        f.core.change(&change(json!({"size": 64 * MIB})), TimeMs(0)).unwrap_err().to_string();
    assert!(
        refused.starts_with("parameter \"size\" is unknown; those of psi are burst, "),
        "{refused}"
    );
    let mut config = PressureConfig::default();
    for (json, size_mib) in [
        (json!({"policy": "fixed", "size": 32 * MIB}), 32),
        (json!({"size": 64 * MIB}), 64),
        (json!({"params": {"size": "96M"}}), 96),
        (json!({"size": 128 * MIB}), 128),
        (json!({"policy": "fixed", "params": {"size": "160M"}}), 160),
    ] {
        f.core.change(&change(json.clone()), TimeMs(0)).unwrap();
        f.core.tick(TimeMs(1_000));
        let requested = f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
        assert_eq!(requested, size_mib * MIB, "{json}");
        // The machine that a reboot builds goes on with it.
        change(json.clone()).apply(&mut config);
        let policy = config.policy(CALL).unwrap();
        assert_eq!(policy.parameters().unwrap().get("size"), Some(size_mib * MIB), "{json}");
    }
}

#[test]
fn resumed_zone_has_no_goal_and_a_later_resize_is_carried_out() {
    let mut f = fixture("off", false, true);
    f.greet();
    f.report_little_free_memory();
    f.core.resize_zone("pm", 1024 * MIB, TimeMs(100)).unwrap();
    let before = f.pm.sizes();
    assert!(before.held_bytes > 0);
    f.core.change(&PressureChange { resume: Some(true), ..Default::default() }, TimeMs(0)).unwrap();
    let sizes = f.pm.sizes();
    assert_eq!((sizes.requested_bytes, sizes.held_bytes), (before.requested_bytes, 0));
    f.core.resize_zone("pm", 1024 * MIB, TimeMs(200)).unwrap();
    assert_eq!(f.pm.sizes().held_bytes, before.held_bytes);
}
