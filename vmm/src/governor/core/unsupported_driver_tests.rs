//! Guests whose virtio-mem drivers the devices have refused.

use std::sync::Arc;

use balloon::DriverState;
use balloon::controller::ResizeStatus;
use foreshore_devices::virtio::mem::UNSUPPORTED_DRIVER;

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::fake::{BLOCK, FakeDevice, Fixture, MIB, fixture, hello, report};

fn refuse_all(f: &Fixture) {
    f.dram.refuse_driver();
    f.pm.refuse_driver();
}

fn requested_bytes(f: &Fixture) -> u64 {
    f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes
}

#[test]
fn a_short_guest_with_a_refused_driver_gets_a_decision_with_the_reason() {
    let mut f = fixture("psi", false, true);
    refuse_all(&f);
    f.greet();
    for _ in 0..400 {
        f.report(20);
        f.core.tick(TimeMs(f.seq * 50 + 1));
    }
    assert_eq!(requested_bytes(&f), 0);
    let info = f.core.info(50, TimeMs(f.seq * 50));
    let decision =
        info.decisions.iter().find(|decision| decision.reason == "unsupported_driver").unwrap();
    assert_eq!((decision.direction.as_str(), decision.requested_bytes), ("hold", 0));
    assert!(decision.wanted_bytes > 0 && decision.times > 100, "{decision:?}");
    assert_eq!(f.core.sample(TimeMs(0)).reminders_total, 0);
    assert!(info.zones.iter().all(|zone| !zone.driver_ready));
}

#[test]
fn a_resize_of_a_zone_with_a_refused_driver_is_an_error_that_names_the_kernel() {
    for policy in ["off", "psi"] {
        let mut f = fixture(policy, false, true);
        refuse_all(&f);
        for bytes in [BLOCK, 64 * MIB] {
            let error = f.core.resize_zone("pm", bytes, TimeMs(0)).unwrap_err();
            assert!(
                matches!(
                    &error,
                    GovernorError::NotResizable { id, reason: ResizeTargetError::UnsupportedDriver }
                        if id == "pm"
                ),
                "{error:?}"
            );
            assert!(error.to_string().contains("5.16"), "{error}");
        }
        assert!(f.core.info(0, TimeMs(0)).pinned_zones.is_empty());
        // The size that it has needs no driver.
        f.core.resize_zone("pm", 0, TimeMs(0)).unwrap();
        assert_eq!(f.core.resize_status("pm", TimeMs(0)), Some(ResizeStatus::Reached));
    }
}

#[test]
fn a_resize_that_waits_for_its_driver_is_stuck_when_that_is_refused_and_stays_so() {
    let mut f = fixture("off", false, true);
    f.pm.sizes.lock().driver = DriverState::Absent;
    f.core.resize_zone("pm", 64 * MIB, TimeMs(0)).unwrap();
    f.core.tick(TimeMs(100));
    assert_eq!(f.core.resize_status("pm", TimeMs(100)), Some(ResizeStatus::Pending));
    f.pm.refuse_driver();
    for now in (200..120_000).step_by(200).map(TimeMs) {
        f.core.tick(now);
        let expected = ResizeStatus::Stuck(format!("driver: {UNSUPPORTED_DRIVER}"));
        assert_eq!(f.core.resize_status("pm", now), Some(expected));
    }
    assert_eq!((requested_bytes(&f), *f.pm.reminders.lock()), (0, 0));
    // Until a client requests the plugged size.
    f.core.resize_zone("pm", 0, TimeMs(120_000)).unwrap();
    assert_eq!(f.core.resize_status("pm", TimeMs(120_000)), Some(ResizeStatus::Reached));
}

#[test]
fn a_size_at_boot_is_withdrawn_from_a_refused_driver_with_its_steps() {
    let mut f = fixture("off", false, true);
    f.pm.sizes.lock().driver = DriverState::Absent;
    f.greet();
    f.report_little_free_memory();
    let target = f.core.zones().target("pm", 1024 * MIB).unwrap();
    f.core.boot_with(target, TimeMs(100));
    assert!(f.pm.sizes().held_bytes > 0);
    f.pm.refuse_driver();
    for now in (200..20_000).step_by(200).map(TimeMs) {
        f.core.tick(now);
    }
    let sizes = f.pm.sizes();
    assert_eq!((sizes.requested_bytes, sizes.held_bytes), (0, 0));
}

#[test]
fn request_to_a_refused_driver_ends_and_another_zone_gets_it() {
    let mut f = fixture("psi", false, false);
    f.dram.sizes.lock().driver = DriverState::Absent;
    f.pm.sizes.lock().driver = DriverState::Absent;
    f.greet();
    f.report(20);
    assert!(f.dram.sizes().requested_bytes > 0, "the driver may come");
    f.dram.refuse_driver();
    f.core.tick(TimeMs(f.seq * 50 + 1));
    f.report(20);
    assert_eq!(f.dram.sizes().requested_bytes, 0);
    assert!(f.pm.sizes().requested_bytes > 0);
    let decisions = f.core.info(50, TimeMs(f.seq * 50)).decisions;
    let first = serde_json::to_value(&decisions.last().unwrap().outcome).unwrap();
    assert_eq!((&first["state"], &first["lack"]), (&json("partly"), &json("driver")));
}

fn json(text: &str) -> serde_json::Value {
    serde_json::Value::from(text)
}

#[test]
fn a_newer_kernel_after_a_refused_driver_is_served_at_once() {
    let mut f = fixture("psi", false, true);
    refuse_all(&f);
    f.greet();
    for _ in 0..100 {
        f.report(20);
    }
    assert_eq!(requested_bytes(&f), 0);
    for device in [&f.dram, &f.pm] {
        let mut sizes = device.sizes.lock();
        (sizes.driver, sizes.is_withdrawn) = (DriverState::Ready, false);
    }
    f.core.tick(TimeMs(f.seq * 50 + 1));
    f.report(20);
    assert!(f.dram.sizes().plugged_bytes > 0);
}

#[test]
fn the_agent_reserves_no_dram_for_memory_that_cannot_be_plugged() {
    let mut f = fixture("psi", false, true);
    assert_eq!(f.core.settings().hotplug_bytes, (128 + 1024) * MIB);
    f.pm.refuse_driver();
    f.core.tick(TimeMs(0));
    assert_eq!(f.core.settings().hotplug_bytes, 128 * MIB);
}

/// A guest of 384 MiB, 256 MiB of them in its balloon, with PM that its driver cannot plug.
fn guest_with_balloon() -> (Core, Arc<FakeDevice>, Arc<FakeDevice>) {
    let (balloon, pm) = (FakeDevice::new(256 * MIB, true), FakeDevice::new(1024 * MIB, true));
    pm.refuse_driver();
    let zone = |id: &str, tier, device: &Arc<FakeDevice>| GovernedZone {
        id: id.to_owned(),
        tier,
        guest_numa_node: 0,
        boot_bytes: 384 * MIB,
        device: Arc::clone(device) as _,
    };
    let zones =
        vec![zone(BALLOON_ZONE, balloon::Tier::Dram, &balloon), zone("pm", balloon::Tier::Pm, &pm)];
    let config = PressureConfig { policy: "psi".to_owned(), ..Default::default() };
    let core = Core::new(&config, zones, 128 * MIB, Arc::new(|| 1024 * MIB), TimeMs(0)).unwrap();
    (core, balloon, pm)
}

#[test]
fn a_guest_with_a_refused_driver_is_governed_by_its_balloon() {
    let (mut core, balloon, pm) = guest_with_balloon();
    core.agent_connected(TimeMs(0));
    let say = |core: &mut Core, line: serde_json::Value, now| {
        core.line(Ok(line.to_string().as_bytes()), now, now, Duration::default);
    };
    say(&mut core, hello(), TimeMs(0));
    // It deflates when it is short.
    say(&mut core, without_hotplug(1, 20, 0), TimeMs(50));
    let deflated_bytes = balloon.sizes().plugged_bytes;
    assert!(deflated_bytes > 0);
    // It inflates when it is at rest.
    for seq in 2..2_000 {
        let plugged_bytes = balloon.sizes().plugged_bytes;
        say(
            &mut core,
            without_hotplug(seq, 90 + plugged_bytes / MIB, plugged_bytes),
            TimeMs(seq * 50),
        );
    }
    assert!(balloon.sizes().plugged_bytes < deflated_bytes, "{:?}", balloon.sizes());
    assert_eq!(pm.sizes().requested_bytes, 0);
    // The balloon cannot give enough.
    for seq in 2_000..2_100 {
        say(&mut core, without_hotplug(seq, 2, balloon.sizes().plugged_bytes), TimeMs(seq * 50));
    }
    assert_eq!(balloon.sizes().plugged_bytes, 256 * MIB);
    let decisions = core.info(1, TimeMs(105_000)).decisions;
    assert_eq!(decisions[0].reason, "unsupported_driver", "{decisions:?}");
}

/// Report of a guest with 120 MiB and the deflated part of its balloon.
fn without_hotplug(seq: u64, available_mib: u64, deflated_bytes: u64) -> serde_json::Value {
    let mut line = report(seq, available_mib, [0, 0]);
    line["memory"]["total_bytes"] = (120 * MIB + deflated_bytes).into();
    let free_bytes = available_mib.min(60) * MIB;
    line["memory"]["free_bytes"] = free_bytes.into();
    line["zones"][0]["free_pages"] = (free_bytes / 4096).into();
    line["zones"][0]["managed_pages"] = ((120 * MIB + deflated_bytes) / 4096).into();
    line
}
