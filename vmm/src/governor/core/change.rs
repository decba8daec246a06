//! Changes to the governor by `vm.pressure`. Every changed value is logged.

use std::collections::BTreeSet;

use balloon::controller::{Controller, Rules, Status};
use balloon::governor::{Change, Event};
use balloon::params::{Parameters, Setting};
use balloon::policy::Policy;
use balloon::{TimeMs, ZoneId};
use tracing::info;

use super::super::GovernorError;
use super::super::info::PressureChange;
use super::{CALL, Core, fit};
use crate::config::{FIXED_SIZE, ParamSettings, PressureConfig, rules_as_well};

impl Core {
    /// Applies a change, and logs each value that it changes.
    pub fn change(&mut self, change: &PressureChange, now: TimeMs) -> Result<(), GovernorError> {
        let before = Present::of(self.governor.controller());
        let change = self.check(change)?;
        self.step(Event::Change(change), now);
        before.say_changes(&Present::of(self.governor.controller()), |zone| self.name(zone));
        Ok(())
    }

    /// Validates a complete change. The change is then applied as a whole or not at all.
    fn check(&self, change: &PressureChange) -> Result<Change, GovernorError> {
        let zone = change.zone.as_deref().map(|id| self.zones().find(id)).transpose()?;
        let controller = self.governor.controller();
        let policy = match &change.policy {
            Some(name) => {
                let (policy, params) = (name.clone(), change.params.clone().unwrap_or_default());
                let config =
                    PressureConfig { policy, params, size: change.size, ..Default::default() };
                config.policy(CALL)?
            }
            None => {
                let size = change.size.map(|bytes| (FIXED_SIZE, Setting::Number(bytes)));
                let size = size.iter().map(|(name, setting)| (*name, setting));
                let settings = size.chain(by_name(&change.params));
                let policy = controller.policy().with(settings);
                policy.map_err(rules_as_well)?
            }
        };
        let rules = controller.rules().with(by_name(&change.rules))?;
        fit(&policy, rules.floor_bytes, self.devices.view().region_bytes())?;
        let has_policy =
            change.policy.is_some() || change.params.is_some() || change.size.is_some();
        Ok(Change {
            policy: has_policy.then_some(policy),
            rules: change.rules.is_some().then_some(rules),
            dry_run: change.dry_run,
            resume: (change.resume == Some(true)).then_some(zone),
            paused: change.paused(),
        })
    }
}

fn by_name(settings: &Option<ParamSettings>) -> impl Iterator<Item = (&str, &Setting)> {
    settings.iter().flatten().map(|(name, setting)| (name.as_str(), setting))
}

struct Present {
    status: Status,
    policy: Policy,
    rules: Rules,
}

impl Present {
    fn of(controller: &Controller) -> Self {
        let (policy, rules) = (controller.policy().clone(), controller.rules().clone());
        Self { status: controller.status(), policy, rules }
    }

    /// Logs every difference between `self` and `now`. `id` returns the ID of a zone.
    fn say_changes<'a>(&self, now: &Self, id: impl Fn(ZoneId) -> &'a str) {
        for (what, from, to) in self.changes(now) {
            info!(what, from, to, "Changed a setting of the governor");
        }
        let after: BTreeSet<_> = now.status.pinned.iter().collect();
        for zone in self.status.pinned.iter().filter(|zone| !after.contains(zone)) {
            info!(zone = id(*zone), "The zone is governed again");
        }
    }

    fn changes(&self, now: &Self) -> Vec<(&'static str, String, String)> {
        let on = |on| if on { "on" } else { "off" };
        let texts = |from: &str, to: &str| (from.to_owned(), to.to_owned());
        let mut all = vec![
            ("policy", texts(self.policy.name(), now.policy.name())),
            ("dry_run", texts(on(self.status.dry_run), on(now.status.dry_run))),
            ("paused", texts(on(self.status.paused), on(now.status.paused))),
        ];
        // The parameters of a new policy are compared with its defaults.
        let same = self.policy.name() == now.policy.name();
        let before =
            if same { Some(self.policy.clone()) } else { Policy::from_name(now.policy.name()) };
        if let Some((from, to)) =
            before.as_ref().and_then(Policy::parameters).zip(now.policy.parameters())
        {
            all.extend(parameters(from, to));
        }
        all.extend(parameters(&self.rules, &now.rules));
        let changed = all.into_iter().filter(|(_, (from, to))| from != to);
        changed.map(|(what, (from, to))| (what, from, to)).collect()
    }
}

/// Names and values in two sets of parameters with the same table.
fn parameters<'a>(
    from: &'a dyn Parameters,
    to: &'a dyn Parameters,
) -> impl Iterator<Item = (&'static str, (String, String))> + 'a {
    from.table().iter().enumerate().map(move |(index, param)| {
        let shown = |params: &dyn Parameters| param.unit.show(params.value(index));
        (param.name, (shown(from), shown(to)))
    })
}

#[cfg(test)]
mod tests {
    use balloon::TimeMs;
    use serde_json::json;

    use crate::governor::fake::{BLOCK, MIB, fixture, logged};
    use foreshore_devices::virtio::zone_device::ZoneDevice;

    #[test]
    fn each_changed_value_is_logged_with_its_old_value() {
        let mut f = fixture("psi", true);
        f.core.resize_zone("pm", BLOCK, TimeMs(0)).unwrap();
        let mut said = |change| {
            let lines = logged(|| drop(f.change(change)));
            assert!(lines.iter().all(|line| line.contains(" INFO ")), "{lines:?}");
            lines.iter().map(|line| line.split_once(": ").unwrap().1.to_owned()).collect::<Vec<_>>()
        };
        let line = |what, from, to| {
            format!(r#"Changed a setting of the governor what="{what}" from="{from}" to="{to}""#)
        };
        assert_eq!(said(json!({"dry_run": true})), [line("dry_run", "off", "on")]);
        assert_eq!(said(json!({"dry_run": true})), [""; 0], "a repeated setting is not a change");
        assert_eq!(said(json!({"pause": true})), [line("paused", "off", "on")]);
        assert_eq!(
            said(json!({"params": {"idle": "9s", "stall": 100}, "rules": {"cool_down": "2s"}})),
            [line("idle", "10s", "9s"), line("cool_down", "5s", "2s")]
        );
        assert_eq!(
            said(json!({"params": {"idle": "1s"}, "rules": {"moon": 1}})),
            [""; 0],
            "refused"
        );
        assert_eq!(
            said(json!({"policy": "amf", "params": {"reclaim": 40}, "dry_run": false})),
            [
                line("policy", "psi", "amf"),
                line("dry_run", "on", "off"),
                line("reclaim", "30", "40")
            ]
        );
        assert_eq!(
            said(json!({"resume": true, "zone": "pm"})),
            ["The zone is governed again zone=\"pm\""]
        );
        assert_eq!(said(json!({"resume": true})), [line("paused", "on", "off")]);
        assert_eq!(said(json!({"policy": "off"})), [line("policy", "amf", "off")]);
    }

    /// The guest becomes short of memory once, and follows all requests.
    #[test]
    fn lines_that_the_document_explains_are_logged() {
        const DOCUMENT: &str = include_str!("../../../../docs/reference/policies.md");
        let mut f = fixture("psi", true);
        let lines = logged(|| {
            f.greet();
            f.report(20);
            let plugged_bytes = f.dram.sizes().plugged_bytes + f.pm.sizes().plugged_bytes;
            f.core.tick(TimeMs(60));
            f.report(20 + plugged_bytes / MIB);
            f.core.tick(TimeMs(1_300));
        });
        // Rate-limited lines contain `times=`. The limit counts lines of all tests, so such lines
        // may be missing in this test.
        let said = lines.iter().map(|line| line.split_once(": ").unwrap().1);
        let said: Vec<_> = said.filter(|line| !line.contains(" times=")).collect();
        assert!(said.len() > 1, "{said:?}");
        let missing: Vec<_> = said.iter().filter(|line| !DOCUMENT.contains(**line)).collect();
        assert!(missing.is_empty(), "docs/reference/policies.md lacks {missing:#?}");
    }
}
