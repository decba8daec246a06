//! Tests of the metrics of a governor that has just started.

use balloon::TimeMs;

use super::*;
use crate::governor::core::Core;
use crate::governor::fake::{fixture, hello};
use crate::governor::info::PressureChange;

/// Governor of a guest that has just booted.
#[derive(Debug)]
struct JustStarted(parking_lot::Mutex<Core>);

impl PressureSource for JustStarted {
    fn sample(&self) -> Option<PressureSample> {
        Some(self.0.lock().sample(TimeMs(0)))
    }
}

#[test]
fn every_reason_is_exposed_from_the_start() {
    let core = fixture("psi", true).core;
    let governor = Arc::new(JustStarted(core.into()));
    let metrics = Metrics::new("a");
    let source = Arc::downgrade(&governor) as Weak<dyn PressureSource>;
    let _registration = metrics.register(Arc::new(PressureMetrics(source)));
    let text = metrics.encode(&ZoneMetrics::default()).unwrap();
    let has = |text: &str, line: String| {
        assert!(text.lines().any(|shown| shown == line), "{line} in {text}")
    };
    let plans = |text: &str, policy: &str| {
        for direction in balloon::plan::Direction::ALL.map(|direction| direction.label()) {
            for reason in balloon::plan::Reason::ALL.iter().map(|reason| reason.label()) {
                let labels = format!(
                    r#"vm="a",policy="{policy}",direction="{direction}",reason="{reason}""#
                );
                has(text, format!("foreshore_pressure_plans_total{{{labels}}} 0"));
            }
        }
    };
    plans(&text, "psi");
    assert!(!text.contains(r#"policy="amf""#), "{text}");
    for reason in balloon::proto::Refusal::LABELS {
        has(
            &text,
            format!(r#"foreshore_pressure_refused_reports_total{{vm="a",reason="{reason}"}} 0"#),
        );
    }
    // A change of the policy adds the reasons of the new policy, and keeps those of the old one.
    let change = PressureChange { policy: Some("amf".to_owned()), ..Default::default() };
    governor.0.lock().change(&change, TimeMs(0)).unwrap();
    let text = metrics.encode(&ZoneMetrics::default()).unwrap();
    plans(&text, "psi");
    plans(&text, "amf");
}

#[test]
fn guest_software_of_an_earlier_boot_is_not_exposed() {
    let metrics = Metrics::new("a");
    let boot = || {
        let governor = Arc::new(JustStarted(fixture("psi", true).core.into()));
        let source = Arc::downgrade(&governor) as Weak<dyn PressureSource>;
        (metrics.register(Arc::new(PressureMetrics(source))), governor)
    };
    let shown = || {
        let text = metrics.encode(&ZoneMetrics::default()).unwrap();
        let lines = text.lines().filter(|line| line.starts_with("foreshore_guest_info{"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let greet = |governor: &JustStarted, kernel: &str| {
        let mut hello = hello();
        hello["kernel_release"] = kernel.into();
        let mut core = governor.0.lock();
        core.agent_connected(TimeMs(0));
        core.line(&hello, TimeMs(0), Duration::default);
    };
    let first = boot();
    greet(&first.1, "6.1.1");
    assert!(shown()[0].contains(r#"kernel="6.1.1""#) && shown().len() == 1, "{:?}", shown());
    // A reboot drops the machine before it builds the next one.
    drop(first);
    let second = boot();
    assert_eq!(shown(), [""; 0]);
    greet(&second.1, "6.12.2");
    assert!(shown()[0].contains(r#"kernel="6.12.2""#) && shown().len() == 1, "{:?}", shown());
}
