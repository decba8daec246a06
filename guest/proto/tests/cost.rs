//! Counts allocations when a line is received and when it is sent.

mod allocations;

use foreshore_proto::{
    Blocks, NodeBlocks, NodeIdle, PROTOCOL_VERSION, RawAgentMessage, RawReport, Zone,
    decode_agent_message, encode_report,
};

#[test]
fn report_is_decoded_without_a_copy_of_its_fields() {
    let report = RawReport {
        version: PROTOCOL_VERSION,
        zones: vec![Zone::default(); 4],
        blocks: Blocks { nodes: vec![NodeBlocks::default(); 2], ..Blocks::default() },
        idle: vec![NodeIdle::default(); 2],
        ..RawReport::default()
    };
    let mut line = Vec::new();
    encode_report(&report, &mut line);
    let (count, decoded) = allocations::count(|| decode_agent_message(&line));
    assert_eq!(decoded, Ok(RawAgentMessage::Report(report.clone())));
    assert_eq!(count, 4, "one for each list, and one for serde_json to count nested levels");
    // Decoding the enum directly allocates far more often.
    let (count, decoded) = allocations::count(|| serde_json::from_slice::<RawAgentMessage>(&line));
    assert!(decoded.is_ok() && count > 10, "{count}");
    let (count, ()) = allocations::count(|| encode_report(&report, &mut line));
    assert_eq!(count, 0, "building a report allocates nothing");
}
