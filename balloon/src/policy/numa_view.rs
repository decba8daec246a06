//! The guest's nodes as the tables of the papers need them, and requested memory that has not
//! arrived on them yet.
//!
//! In the papers, the kernel adds PM to the node that is short of memory. Here, PM is a node of its
//! own. "The node" of a table therefore means a node with DRAM, together with the PM nearest to it.

use foreshore_proto::{OnlinePolicy, Zone, ZoneKind};

use super::Input;
use super::boot_memory::BootMemory;
use super::onlining::OnliningMemory;
use crate::units::{PAGE_BYTES, SECTION_BYTES};
use crate::{HostView, Tier, TimeMs};

/// A node with DRAM, together with the PM nearest to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeView {
    /// Number of the node with DRAM.
    pub node: u32,
    /// R: free pages of the node's DRAM and PM. Once the node's PM is used up, free pages of all
    /// other PM are included.
    pub free_pages: u64,
    /// `free_pages` without the PM of other nodes.
    pub own_free_pages: u64,
    /// Sums of the watermarks over the zones of the node's DRAM. PM's watermarks are not included,
    /// because they would change whenever PM is plugged. In the papers, watermarks are constant
    /// after boot.
    pub min_pages: u64,
    pub low_pages: u64,
    pub high_pages: u64,
    /// D: managed DRAM of the node.
    pub dram_bytes: u64,
    /// P: PM that the node can have, whether plugged or not.
    pub pm_bytes: u64,
    /// Requested part of P.
    pub pm_requested_bytes: u64,
    /// Part of P that is both online and free.
    pub pm_free_bytes: u64,
    /// Number of whole sections in `pm_free_bytes`.
    pub pm_free_sections: u64,
}

/// Returns the guest's nodes with DRAM, ordered by number.
pub(super) fn nodes(input: Input<'_>) -> Vec<NodeView> {
    let Input { report, host, .. } = input;
    let mut nodes: Vec<NodeView> = Vec::new();
    for zone in report.zones().iter().filter(|zone| zone.managed_pages > 0 && !is_pm(zone, input)) {
        let index = match nodes.binary_search_by_key(&zone.node, |node| node.node) {
            Ok(index) => index,
            Err(index) => {
                nodes.insert(index, NodeView { node: zone.node, ..NodeView::default() });
                index
            }
        };
        let node = &mut nodes[index];
        node.free_pages += zone.free_pages;
        node.min_pages += zone.min_pages;
        node.low_pages += zone.low_pages;
        node.high_pages += zone.high_pages;
        node.dram_bytes += dram_pages(zone, host) * PAGE_BYTES;
    }
    let mut all_pm_pages = 0;
    for zone in pm_zones(input) {
        all_pm_pages += zone.free_pages;
        if let Some(index) = nearest(&nodes, zone.node, host) {
            nodes[index].pm_free_bytes += zone.free_pages * PAGE_BYTES;
            nodes[index].pm_free_sections += zone.free_pages * PAGE_BYTES / SECTION_BYTES;
        }
    }
    for zone in host.zones.iter().filter(|zone| zone.tier == Tier::Pm) {
        if let Some(index) = nearest(&nodes, zone.guest_numa_node, host) {
            let node = &mut nodes[index];
            node.pm_bytes = node.pm_bytes.saturating_add(zone.requestable_bytes());
            node.pm_requested_bytes = node.pm_requested_bytes.saturating_add(zone.requested_bytes);
        }
    }
    for node in &mut nodes {
        // A node that has used up its own PM receives PM of other nodes. Free PM on other nodes is
        // therefore available to it.
        node.own_free_pages = node.free_pages + node.pm_free_bytes / PAGE_BYTES;
        let used_up = node.pm_requested_bytes >= node.pm_bytes;
        node.free_pages =
            if used_up { node.free_pages + all_pm_pages } else { node.own_free_pages };
    }
    nodes
}

pub(super) fn pm_zones(input: Input<'_>) -> impl Iterator<Item = &Zone> {
    input.report.zones().iter().filter(move |zone| zone.managed_pages > 0 && is_pm(zone, input))
}

/// Sum of the high watermarks of `nodes`, multiplied by `scale`.
pub(super) fn scaled_high_bytes(nodes: &[NodeView], scale: u64) -> u64 {
    let pages = nodes.iter().fold(0u64, |sum, node| sum.saturating_add(node.high_pages));
    pages.saturating_mul(PAGE_BYTES).saturating_mul(scale)
}

/// Returns true if a zone of the guest is PM. A node of PM has memory only in ZONE_MOVABLE. A node
/// into which DRAM can also be plugged counts as DRAM, because reports do not distinguish the two.
fn is_pm(zone: &Zone, input: Input<'_>) -> bool {
    let zones_of_tier = |tier| {
        let zones = input.host.zones.iter();
        zones.filter(move |sizes| sizes.tier == tier && sizes.guest_numa_node == zone.node)
    };
    if zones_of_tier(Tier::Dram).next().is_some() || zones_of_tier(Tier::Pm).next().is_none() {
        return false;
    }
    let movable = matches!(
        input.report.blocks().online_policy,
        OnlinePolicy::OnlineMovable | OnlinePolicy::Unknown | OnlinePolicy::Offline
    );
    match zone.kind {
        ZoneKind::Movable => true,
        // If a guest does not online memory as movable, the first memory on a node is placed in
        // ZONE_NORMAL.
        ZoneKind::Normal => {
            let plugged = zones_of_tier(Tier::Pm)
                .fold(0u64, |sum, sizes| sum.saturating_add(sizes.plugged_bytes));
            !movable && zone.managed_pages * PAGE_BYTES <= plugged
        }
        _ => false,
    }
}

/// DRAM pages in a zone: all of its pages, unless PM is also plugged into its node.
fn dram_pages(zone: &Zone, host: &HostView) -> u64 {
    let node_zones = || host.zones.iter().filter(|sizes| sizes.guest_numa_node == zone.node);
    if zone.kind != ZoneKind::Movable || node_zones().all(|sizes| sizes.tier == Tier::Dram) {
        return zone.managed_pages;
    }
    let dram = node_zones().filter(|sizes| sizes.tier == Tier::Dram);
    let plugged = dram.fold(0u64, |sum, sizes| sum.saturating_add(sizes.plugged_bytes));
    zone.managed_pages.min(plugged / PAGE_BYTES)
}

/// Index of the node nearest to node `pm`. If several are equally near, the first one is returned.
fn nearest(nodes: &[NodeView], pm: u32, host: &HostView) -> Option<usize> {
    (0..nodes.len()).min_by_key(|index| host.distances.between(nodes[*index].node, pm))
}

/// Requested memory that is not free yet, by the node for which it was requested.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OutstandingMemory {
    boot_memory: BootMemory,
    onlining: OnliningMemory,
    /// Requested size at the last report.
    requested_bytes: u64,
    outstanding_bytes: u64,
    granted: Vec<Grant>,
}

/// Memory that was requested for one node. Part of it has not arrived yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grant {
    node: u32,
    granted_bytes: u64,
    /// Part that the table requested after the last report. The next report shows how much of it
    /// the controller requested from the guest.
    unconfirmed_bytes: u64,
    outstanding_bytes: u64,
    /// Free memory on the node, not including the memory of this grant.
    free_bytes: u64,
}

impl Grant {
    /// Subtracts memory that will never arrive.
    fn cancel(&mut self, bytes: u64) {
        self.granted_bytes = self.granted_bytes.saturating_sub(bytes);
        self.outstanding_bytes = self.outstanding_bytes.saturating_sub(bytes);
    }

    /// Returns the part that has arrived and is still free, if the node has `free_bytes` of free
    /// memory. A node that uses this part up is short of memory again.
    fn arrived_free_bytes(&self, free_bytes: u64) -> u64 {
        let arrived_bytes = self.granted_bytes.saturating_sub(self.outstanding_bytes);
        free_bytes.saturating_sub(self.free_bytes).min(arrived_bytes)
    }
}

impl OutstandingMemory {
    /// Updates the amounts from a report. Memory that is online and has had time to become free no
    /// longer counts as outstanding.
    pub(super) fn observe(&mut self, input: Input<'_>, now: TimeMs) {
        let memory = input.report.memory();
        self.boot_memory.learn(input, now);
        let online_bytes = self.boot_memory.online_bytes(memory.total_bytes, input.host);
        // Tables use the free pages of the zones, which the agent does not read at the same time as
        // the total. Memory that is free in only one of the two counts as not arrived yet.
        let zones_free_pages =
            input.report.zones().iter().fold(0u64, |sum, zone| sum + zone.free_pages);
        let free_bytes = memory.free_bytes.min(zones_free_pages * PAGE_BYTES);
        let onlining_bytes = self.onlining.learn(memory.total_bytes, free_bytes, now);
        let requested_bytes = input.host.requested_bytes();
        self.outstanding_bytes =
            requested_bytes.saturating_add(onlining_bytes).saturating_sub(online_bytes);
        self.match_requests(requested_bytes);
        for grant in &mut self.granted {
            grant.outstanding_bytes = grant.outstanding_bytes.min(self.outstanding_bytes);
        }
        self.granted.retain(|grant| grant.outstanding_bytes > 0);
    }

    /// Reduces grants to the memory that the controller requested from the guest. The rules that
    /// apply to every policy may request less than a table, or withdraw a request, and that memory
    /// never arrives.
    fn match_requests(&mut self, requested_bytes: u64) {
        let before_bytes = std::mem::replace(&mut self.requested_bytes, requested_bytes);
        let mut grown_bytes = requested_bytes.saturating_sub(before_bytes);
        let mut shrunk_bytes = before_bytes.saturating_sub(requested_bytes);
        for grant in &mut self.granted {
            let unconfirmed_bytes = std::mem::take(&mut grant.unconfirmed_bytes);
            let granted_bytes = unconfirmed_bytes.min(grown_bytes);
            grown_bytes -= granted_bytes;
            grant.cancel(unconfirmed_bytes - granted_bytes);
            let withdrawn_bytes =
                grant.outstanding_bytes.saturating_sub(self.outstanding_bytes).min(shrunk_bytes);
            shrunk_bytes -= withdrawn_bytes;
            grant.cancel(withdrawn_bytes);
        }
    }

    /// Returns the requested memory that the guest does not have yet.
    pub(super) fn bytes(&self) -> u64 {
        self.outstanding_bytes
    }

    /// Returns the memory that was requested for `node` or for no particular node and has not
    /// arrived yet, plus the memory that has arrived for `node` and is still free. In the papers, a
    /// kernel evaluates a table again only after all the memory that it adds has arrived.
    pub(super) fn for_node(&self, node: &NodeView) -> u64 {
        let others = self.granted.iter().filter(|grant| grant.node != node.node);
        let other_grants_bytes =
            others.fold(0u64, |sum, grant| sum.saturating_add(grant.outstanding_bytes));
        let unassigned_bytes = self.outstanding_bytes.saturating_sub(other_grants_bytes);
        let own_grant = self.granted.iter().find(|grant| grant.node == node.node);
        own_grant.map_or(unassigned_bytes, |own_grant| {
            let free_bytes =
                own_grant.arrived_free_bytes(node.free_pages.saturating_mul(PAGE_BYTES));
            own_grant.outstanding_bytes.max(unassigned_bytes).saturating_add(free_bytes)
        })
    }

    /// Records that `bytes` were requested for `node`.
    pub(super) fn grant(&mut self, node: &NodeView, bytes: u64) {
        let free_bytes = node.free_pages.saturating_mul(PAGE_BYTES);
        match self.granted.iter_mut().find(|grant| grant.node == node.node) {
            Some(grant) => {
                grant.free_bytes = free_bytes.saturating_sub(grant.arrived_free_bytes(free_bytes));
                grant.granted_bytes = grant.granted_bytes.saturating_add(bytes);
                grant.unconfirmed_bytes = grant.unconfirmed_bytes.saturating_add(bytes);
                grant.outstanding_bytes = grant.outstanding_bytes.saturating_add(bytes);
            }
            None => self.granted.push(Grant {
                node: node.node,
                granted_bytes: bytes,
                unconfirmed_bytes: bytes,
                outstanding_bytes: bytes,
                free_bytes,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MIB;
    use crate::policy::Policy;
    use crate::policy::testing::{GIB, HIGH, LOW, MIN, Rig};

    fn view(rig: &Rig) -> Vec<NodeView> {
        let report = foreshore_proto::Report::try_from(rig.raw.clone()).expect("sound");
        nodes(Input { report: &report, host: &rig.host, is_carried_out: true })
    }

    fn rig() -> Rig {
        let mut rig = Rig::new(Policy::Off, &[4 * GIB, 2 * GIB], &[8 * GIB, 16 * GIB]);
        rig.plug(0, GIB);
        rig
    }

    #[test]
    fn node_has_its_dram_and_nearest_pm() {
        let pages = |bytes| bytes / PAGE_BYTES;
        let first = NodeView {
            node: 0,
            free_pages: pages(5 * GIB),
            own_free_pages: pages(5 * GIB),
            min_pages: MIN,
            low_pages: LOW,
            high_pages: HIGH,
            dram_bytes: 4 * GIB,
            pm_bytes: 8 * GIB,
            pm_requested_bytes: GIB,
            pm_free_bytes: GIB,
            pm_free_sections: 8,
        };
        let second = NodeView {
            node: 1,
            free_pages: pages(2 * GIB),
            own_free_pages: pages(2 * GIB),
            dram_bytes: 2 * GIB,
            pm_bytes: 16 * GIB,
            pm_requested_bytes: 0,
            pm_free_bytes: 0,
            pm_free_sections: 0,
            ..first
        };
        assert_eq!(view(&rig()), [first, second]);
    }

    #[test]
    fn without_distances_first_node_has_all_pm() {
        let mut rig = rig();
        rig.host.distances = crate::Distances::default();
        let nodes = view(&rig);
        assert_eq!((nodes[0].pm_bytes, nodes[1].pm_bytes), (24 * GIB, 0));
        assert_eq!(nodes[1].free_pages, 3 * GIB / PAGE_BYTES, "which the second lives on");
        assert_eq!(nodes[1].own_free_pages, 2 * GIB / PAGE_BYTES);
    }

    #[test]
    fn pm_can_be_in_a_node_of_dram() {
        let mut rig = rig();
        rig.host.zones[0].guest_numa_node = 0;
        rig.raw.zones[2].node = 0;
        let nodes = view(&rig);
        assert_eq!((nodes[0].dram_bytes, nodes[0].pm_free_bytes), (4 * GIB, GIB));
        // If DRAM can be plugged into the same node, reports do not distinguish it from PM.
        // However, the host knows how much DRAM is plugged.
        let dram =
            crate::ZoneSizes { tier: Tier::Dram, plugged_bytes: 512 * MIB, ..rig.host.zones[0] };
        rig.host.zones.push(dram);
        let nodes = view(&rig);
        assert_eq!((nodes[0].dram_bytes, nodes[0].pm_free_bytes), (4 * GIB + 512 * MIB, 0));
    }

    #[test]
    fn pm_that_is_not_onlined_as_movable_is_pm() {
        let mut rig = rig();
        rig.raw.zones[2].kind = ZoneKind::Normal;
        assert_eq!(view(&rig).len(), 3, "a node with DRAM, according to reports");
        rig.raw.blocks.online_policy = OnlinePolicy::Online;
        let nodes = view(&rig);
        assert_eq!((nodes.len(), nodes[0].pm_free_bytes), (2, GIB));
    }

    #[test]
    fn outstanding_memory_is_tracked_by_node() {
        let mut rig = rig();
        rig.plug(0, 0);
        let mut outstanding = OutstandingMemory::default();
        let observe = |rig: &Rig, outstanding: &mut OutstandingMemory, at| {
            let report = foreshore_proto::Report::try_from(rig.raw.clone()).expect("sound");
            outstanding.observe(
                Input { report: &report, host: &rig.host, is_carried_out: true },
                TimeMs(at),
            );
        };
        observe(&rig, &mut outstanding, 0);
        let nodes = view(&rig);
        assert_eq!((outstanding.bytes(), outstanding.for_node(&nodes[0])), (0, 0));
        outstanding.grant(&nodes[0], 3 * GIB);
        rig.host.zones[0].requested_bytes = 4 * GIB;
        observe(&rig, &mut outstanding, 50);
        assert_eq!(outstanding.bytes(), 4 * GIB);
        assert_eq!(
            (outstanding.for_node(&nodes[0]), outstanding.for_node(&nodes[1])),
            (4 * GIB, GIB),
            "1 GiB has no node"
        );
        // The memory is plugged but not online yet.
        rig.host.zones[0].plugged_bytes = 4 * GIB;
        observe(&rig, &mut outstanding, 100);
        assert_eq!(outstanding.bytes(), 4 * GIB);
        rig.plug(0, 4 * GIB);
        observe(&rig, &mut outstanding, 150);
        assert_eq!((outstanding.bytes(), outstanding.for_node(&nodes[0])), (0, 0));
    }

    #[test]
    fn memory_plugged_before_first_report_is_not_outstanding() {
        let rig = rig();
        let mut outstanding = OutstandingMemory::default();
        let report = foreshore_proto::Report::try_from(rig.raw.clone()).expect("sound");
        for at in [0, 1_000, 2_000] {
            outstanding.observe(
                Input { report: &report, host: &rig.host, is_carried_out: true },
                TimeMs(at),
            );
        }
        assert_eq!(outstanding.bytes(), 0);
    }

    /// Guests of 213 MiB with 33 MiB free, one for each policy. `amf` and `dapper` request twice
    /// the guest's DRAM. `pmb` and `memorage` are 40 MiB below their watermark. Each case contains
    /// the memory that the policy requests, and the part of it that is onlined first.
    fn short() -> [(Rig, u64, u64); 4] {
        let case = |policy, settings: &[(&str, &str)], asked_mib, online_mib| {
            let settings =
                settings.iter().map(|(name, text)| (*name, crate::params::Setting::from(*text)));
            let settings: Vec<_> = settings.collect();
            let policy = Policy::from_name(policy).expect("listed");
            let policy = policy
                .with(settings.iter().map(|(name, value)| (*name, value)))
                .expect("in bounds");
            let mut rig = Rig::new(policy, &[213 * MIB], &[2 * GIB]);
            let zone = &mut rig.raw.zones[0];
            (zone.min_pages, zone.low_pages, zone.high_pages) = (384, 480, 576);
            rig.free(0, 33 * MIB / PAGE_BYTES);
            (rig, asked_mib * MIB, online_mib * MIB)
        };
        [
            case("amf", &[("watermark-scale", "20")], 426, 128),
            case("dapper", &[("watermark-scale", "16")], 426, 128),
            case("pmb", &[("watermark-scale", "32")], 40, 40),
            case("memorage", &[("watermark-scale", "32"), ("unit", "64M")], 64, 64),
        ]
    }

    /// Requests `granted_bytes`, and onlines `online_bytes` of them. After that, `free_bytes` of
    /// the onlined memory are free.
    fn request_and_online(rig: &mut Rig, granted_bytes: u64, online_bytes: u64, free_bytes: u64) {
        let decision = rig.report(50);
        assert_eq!(rig.added(decision), granted_bytes, "{}", rig.policy.name());
        rig.host.zones[0].requested_bytes = granted_bytes;
        assert_eq!(rig.report(50).want_bytes, None, "already requested");
        rig.host.zones[0].plugged_bytes = online_bytes;
        rig.raw.zones[1].managed_pages = online_bytes / PAGE_BYTES;
        rig.free(1, free_bytes / PAGE_BYTES);
    }

    #[test]
    fn block_in_total_that_is_not_free_yet_is_outstanding() {
        for (mut rig, granted_bytes, online_bytes) in short() {
            request_and_online(&mut rig, granted_bytes, online_bytes, 0);
            for _ in 0..2 {
                assert_eq!(rig.report(50).want_bytes, None, "{}", rig.policy.name());
            }
            rig.free(1, online_bytes / PAGE_BYTES);
            for _ in 0..20 {
                assert_eq!(rig.report(50).want_bytes, None, "{}: it is free", rig.policy.name());
            }
        }
    }

    #[test]
    fn zones_read_before_the_total_cause_no_second_shortage() {
        for (mut rig, granted_bytes, online_bytes) in short().into_iter().take(2) {
            request_and_online(&mut rig, granted_bytes, online_bytes, 0);
            rig.raw.memory.free_bytes += online_bytes;
            assert_eq!(rig.report(50).want_bytes, None, "{}", rig.policy.name());
        }
    }

    #[test]
    fn filled_block_is_missing_two_fast_reports_later() {
        for (mut rig, granted_bytes, online_bytes) in short() {
            request_and_online(&mut rig, granted_bytes, online_bytes, 0);
            let added: Vec<_> = (0..3)
                .map(|_| {
                    let decision = rig.report(50);
                    rig.added(decision)
                })
                .collect();
            assert_eq!(added, [0, 0, online_bytes], "{}", rig.policy.name());
        }
        for (mut rig, granted_bytes, online_bytes) in short() {
            request_and_online(&mut rig, granted_bytes, online_bytes, 0);
            assert_eq!(rig.report(50).want_bytes, None);
            let decision = rig.report(1_000);
            assert_eq!(
                rig.added(decision),
                online_bytes,
                "{}: one slow report later",
                rig.policy.name()
            );
        }
    }

    /// The controller repeatedly requests less than a table does, or withdraws the request. When
    /// the guest frees some of its own pages, they must not be counted as memory of that request.
    #[test]
    fn memory_not_requested_from_guest_has_not_arrived() {
        for is_withdrawn in [false, true] {
            for (mut rig, wanted_bytes, _) in short().into_iter().take(2) {
                let name = rig.policy.name();
                let decision = rig.report(50);
                assert_eq!(rig.added(decision), wanted_bytes, "{name}");
                if is_withdrawn {
                    rig.host.zones[0].requested_bytes = wanted_bytes;
                    assert_eq!(rig.report(50).want_bytes, None, "{name}");
                }
                rig.host.zones[0].requested_bytes = 64 * MIB;
                // With 35 MiB free, the guest is in the same row as with 33 MiB.
                for free_mib in [33, 33, 33, 35, 35] {
                    rig.free(0, free_mib * MIB / PAGE_BYTES);
                    let decision = rig.report(50);
                    assert_eq!(
                        rig.added(decision),
                        wanted_bytes - 64 * MIB,
                        "{name}, {is_withdrawn}"
                    );
                }
            }
        }
    }

    /// A table is evaluated again only after all the memory that it requested has arrived. If
    /// blocks arrive and the node remains in its row, no further request is made.
    #[test]
    fn free_part_of_a_grow_causes_no_second_shortage() {
        for (mut rig, granted_bytes, _) in short().into_iter().take(2) {
            // 35 MiB are free, which is in the same row as 33 MiB.
            request_and_online(&mut rig, granted_bytes, 2 * MIB, 2 * MIB);
            for _ in 0..20 {
                assert_eq!(rig.report(50).want_bytes, None, "{}", rig.policy.name());
            }
            // All requested memory has arrived and has been used up.
            rig.plug(0, granted_bytes);
            rig.free(1, 0);
            let decision = rig.report(1_000);
            assert_eq!(rig.added(decision), granted_bytes, "{}", rig.policy.name());
        }
    }

    #[test]
    fn block_that_was_free_and_is_filled_is_missing_at_once() {
        for (mut rig, granted_bytes, online_bytes) in short() {
            request_and_online(&mut rig, granted_bytes, online_bytes, online_bytes);
            assert_eq!(rig.report(50).want_bytes, None, "{}", rig.policy.name());
            rig.free(1, 0);
            let decision = rig.report(50);
            assert_eq!(rig.added(decision), online_bytes, "{}", rig.policy.name());
        }
    }

    #[test]
    fn arriving_block_does_not_hide_a_worse_row() {
        for ((mut rig, granted_bytes, online_bytes), times) in short().into_iter().zip([5, 16]) {
            request_and_online(&mut rig, granted_bytes, online_bytes, 0);
            rig.free(0, 0);
            let decision = rig.report(50);
            let wanted_bytes = times * 213 * MIB - granted_bytes;
            assert_eq!(rig.added(decision), wanted_bytes, "{}", rig.policy.name());
        }
    }
}
