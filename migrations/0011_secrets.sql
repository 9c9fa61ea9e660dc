-- Several secrets of a webhook may sign beside the present one: whoever rotates twice within a day keeps its receivers.

-- [[secret, Unix ms until which it signs], …], newest first.
ALTER TABLE webhooks ADD COLUMN old_secrets TEXT NOT NULL DEFAULT '[]';
UPDATE webhooks SET old_secrets = json_array(json_array(old_secret, old_secret_until))
WHERE old_secret IS NOT NULL AND old_secret_until IS NOT NULL;
ALTER TABLE webhooks DROP COLUMN old_secret;
ALTER TABLE webhooks DROP COLUMN old_secret_until;
