//! Tests of sizes above the limit of all zones together, and of both names of the size for policy
//! `fixed`.

use serde_json::json;

use super::*;
use crate::governor::fake::{MIB, fixture};
use crate::governor::info::PressureChange;
use balloon::controller::Rules;
use foreshore_devices::virtio::zone_device::ZoneDevice;

#[test]
fn floor_above_all_zones_is_refused() {
    let build = |text| {
        let config = PressureConfig::parse(text).unwrap();
        config.validate().unwrap();
        let core = Core::new(&config, Vec::new(), 384 * MIB, std::sync::Arc::new(|| 0), TimeMs(0));
        core.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(build("floor=0"), Ok(()));
    let message =
        |name| Err(format!("{name} is 64M, must be at most 0, the maximum of all zones together"));
    assert_eq!(build("floor=64M"), message("floor"));
    assert_eq!(build("policy=fixed,size=64M"), message("size"));
}

#[test]
fn error_of_unknown_parameter_lists_known_ones() {
    let mut f = fixture("psi", true);
    f.change(json!({"policy": "amf"})).unwrap();
    let names = Rules::TABLE.iter().map(|param| param.name).collect::<Vec<_>>().join(", ");
    let expected = |name, suggestion| {
        format!(
            "parameter {name:?} is unknown{suggestion}; parameters of amf: watermark-scale, watermark-share, reclaim; parameters of the rules: {names}"
        )
    };
    // A misspelled parameter, a parameter of another policy, and a rule in the wrong place.
    let similar = " (did you mean 'cool_down'?)";
    for (name, suggestion) in [("cooldown", similar), ("idle", ""), ("ceiling", "")] {
        let refused = f.change(json!({"params": {name: "1G"}}));
        assert_eq!(refused, Err(expected(name, suggestion)));
        let refused = f.change(json!({"policy": "amf", "params": {name: "1G"}}));
        assert_eq!(refused, Err(format!("vm.pressure: {}", expected(name, suggestion))));
    }
}

#[test]
fn size_can_be_set_alone_with_policy_fixed() {
    let mut f = fixture("psi", true);
    let refused = f.change(json!({"size": 64 * MIB})).unwrap_err();
    assert!(
        refused.starts_with("parameter \"size\" is unknown; parameters of psi: burst, "),
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
        f.change(json.clone()).unwrap();
        f.core.tick(TimeMs(1_000));
        let requested = f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
        assert_eq!(requested, size_mib * MIB, "{json}");
        // After a reboot, the next machine is built from this configuration.
        let change: PressureChange = serde_json::from_value(json.clone()).unwrap();
        change.apply(&mut config);
        let policy = config.policy(CALL).unwrap();
        assert_eq!(policy.parameters().unwrap().get("size"), Some(size_mib * MIB), "{json}");
    }
}
